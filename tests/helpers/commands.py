import functools

from typer import testing

from helpers.own_environment import umask_of_commands

# Typer makes the command anew for each run, which takes longer than to run most commands.
testing._get_command = functools.cache(testing._get_command)


def invoke(arguments, content=None):
    """Run a command of fastrack in this process, on an input, and return its result. An exception comes through."""
    from fastrack._cli.app import app

    with umask_of_commands():
        return testing.CliRunner().invoke(app, arguments, input=content, catch_exceptions=False)
