import functools

from typer import testing

from helpers.own_environment import umask_of_commands

# Typer makes the command anew for each run, which takes longer than to run most commands.
testing._get_command = functools.cache(testing._get_command)


def application():
    """Return fastrack's command line, an app of Typer. It is not loaded before."""
    from fastrack._cli.app import app

    return app


def whole(command):
    """Return a command of it with its options, which are loaded from the file of its name."""
    from fastrack._cli.program import whole

    return whole(command)


def invoke(arguments, content=None):
    """Run a command of fastrack in this process, on an input, and return its result. An exception comes through."""
    with umask_of_commands():
        return testing.CliRunner().invoke(application(), arguments, input=content, catch_exceptions=False)
