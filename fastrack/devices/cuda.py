"""An NVIDIA GPU: slabs are copied there as they are, and authenticated and decrypted by kernels, chunk by chunk.

The order of things on the device is kept by events alone. For a message that is opened::

    the caller's stream    started ─┐                                                          ┌─ goes on
    uploads                key ─┐   │   slab 0 ─┐  slab 1 ─┐                                   │
    kernels                     └───┴ prepare   └ open 0   └ open 1   wipe key, verdict ── finished

A slab's host memory is free when it was `copied`, and its memory on the device when it was `used`. A message that is
sealed goes the other way: kernel, `used`, download, `copied`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np

from fastrack import arrays, timeline
from fastrack.aead import Bytes, Pieces
from fastrack.aead.base import check_pieces, chunks_between
from fastrack.arrays import Framework
from fastrack.cobblestone import CHUNK, NONCE, STRIDE, TAG, MessageKey, raw_size
from fastrack.devices.base import Slab, Slot
from fastrack.devices.clock import Clock
from fastrack.devices.cuda_memory import UNKNOWN, Controls, CudaSlot, align
from fastrack.devices.driver import Driver, Stream, View
from fastrack.devices.pipeline import Pipeline
from fastrack.errors import DeviceError, FastrackError

__all__ = ["CudaDevice"]

SLAB = 8 << 20
LEAD = 2 << 20
BLOCKS = 2  # of a kernel that run on a multiprocessor at once

_GOOD = 2**64 - 1  # the verdict on a message without a bad chunk


class CudaDevice:
    """`Device` on an NVIDIA GPU.

    Parameters
    ----------
    driver : Driver
        The GPU.
    share : float
        The share of its multiprocessors that kernels may take, above 0 and at most 1. The rest stays free for what else
        runs there.

    Raises
    ------
    ValueError
        If there is no such share.
    """

    in_place = False
    slab = SLAB
    lead = LEAD

    def __init__(self, driver: Driver, *, share: float = 1.0) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"share= must be above 0 and at most 1, not {share}")
        self.name = driver.name
        self._pipeline = Pipeline(driver)
        self._controls = Controls(driver)
        self._blocks = max(1, int(share * driver.multiprocessors) * BLOCKS)

    def framework(self, wanted: Framework | None, origin: Framework | None) -> Framework:
        if wanted == "numpy":
            raise DeviceError(
                f"NumPy keeps no arrays on {self.name!r}; ask for framework='torch' or 'cupy', or another device"
            )
        if wanted is not None:
            return wanted
        if origin is None:
            return "torch" if arrays.installed("torch") else "cupy"
        return "cupy" if origin == "numpy" else origin

    def empty(self, dtype: str, shape: Sequence[int], framework: Framework) -> tuple[Any, View]:
        self._pipeline.require_usable()
        array = self._pipeline.driver.empty(dtype, shape, framework)
        return array, self._pipeline.driver.view(array, writable=True)

    def view(self, array: Any, *, writable: bool) -> View:
        self._pipeline.require_usable()
        return self._pipeline.driver.view(array, writable=writable)

    def clear(self, memory: View) -> None:
        self._pipeline.require_usable()
        driver, kernels = self._pipeline.driver, self._pipeline.kernels
        event = driver.event()
        driver.record(event, memory.stream)
        driver.wait(kernels, event)
        if memory.nbytes:
            driver.fill(memory.pointer, 0, memory.nbytes, kernels)
        driver.record(event, kernels)
        driver.synchronize(event)

    def slot(self, size: int) -> CudaSlot:
        self._pipeline.require_usable()
        return CudaSlot(self._pipeline, size)

    def begin(self, key: MessageKey, memory: View) -> CudaWork:
        self._pipeline.require_usable()
        return CudaWork(self._pipeline, self._controls, self._blocks, key, memory)

    def close(self) -> None:
        if not self._pipeline.forked and self._pipeline.close():
            self._controls.wipe(self._pipeline)


class CudaWork:
    """`Work` whose slabs the copy thread puts on the device's streams.

    What fails there is kept: later slabs are left out, slots come back all the same, and `verdict` tells.
    """

    def __init__(self, pipeline: Pipeline, controls: Controls, blocks: int, key: MessageKey, memory: View) -> None:
        self._pipeline = pipeline
        self._driver = pipeline.driver
        self._blocks = blocks
        self._pointer = memory.pointer
        self._size = memory.nbytes
        self._stream = memory.stream
        self._array = memory.array
        self._bits = 8 * (len(key.material) - NONCE)
        self._error: BaseException | None = None
        self._handed_over = False
        self._finished = threading.Event()
        self._reading = threading.Lock()
        self._word = UNKNOWN
        self._known = False
        self._timeline = timeline.current()
        self._clock: Clock | None = None
        self._controls = controls
        self._control = control = controls.take()
        try:
            control.put(key)
            # The array may still be written to or read by what its owner started before.
            self._driver.record(control.started, self._stream)
            pipeline.submit(self._start)
        except FastrackError:
            control.forget()
            controls.give_back(control)
            raise
        except BaseException:  # an interrupt: it may have been submitted, so nobody else may have the control
            control.forget()
            raise

    def open(self, slab: Slab, sealed: Bytes, slot: Slot | None) -> None:
        self._pipeline.require_usable()  # a forked child may not even write to the slot
        self._require_good()
        assert isinstance(slot, CudaSlot)
        if slab.pieces is None:
            count = self._require_run(slab, slot)
            place = self._pointer + slab.start
            arguments = [place, slab.first, count, slab.stop - slab.start]
            self._submit(slot, partial(self._open, slot, slab, slab.sealed, "open", count, arguments))
            return
        count = self._require_gather(slab, slab.pieces, slot)
        *plan, end = self._write_plan(slab, slab.pieces, slot)
        if count:
            arguments = [self._pointer, *plan, count, slab.stop]
            self._submit(slot, partial(self._open, slot, slab, end, "gather", count, arguments))

    def seal(self, slab: Slab, sealed: Bytes, slot: Slot | None) -> None:
        self._require_good()
        assert isinstance(slot, CudaSlot)
        count = self._require_run(slab, slot)
        source = self._pointer + slab.start
        arguments = [source, slot.twin, slab.first, count, slab.stop - slab.start]
        self._submit(slot, partial(self._seal, slot, slab, count, arguments))

    def end(self) -> None:
        if self._pipeline.forked:
            return
        if not self._handed_over:
            try:
                self._pipeline.submit(self._finish)
            except FastrackError as error:  # closed or given up; closing wipes what is left
                self._error = self._error or error
                return
            self._handed_over = True
        # What the caller starts from here on must find it all on the device's streams.
        self._finished.wait()

    def done(self) -> bool:
        if self._error is not None or self._known or self._pipeline.forked:
            return True
        try:
            return self._finished.is_set() and self._driver.done(self._control.finished)
        except DeviceError:  # `verdict` will find out, and tell
            return True

    def verdict(self) -> int | None:
        if self._pipeline.forked:
            self._pipeline.require_usable()
        self.end()  # an interrupt may have cut it short, and then `finished` still tells of another message
        with self._reading:  # or the control would come back twice, and serve two messages at once
            if self._error is None and not self._known:
                try:
                    self._driver.synchronize(self._control.finished)
                    self._word, self._known = self._control.word, True
                    self._controls.give_back(self._control)
                except DeviceError as error:
                    self.fail(error)
        self._require_good()
        return None if self._word == _GOOD else self._word

    def fail(self, error: BaseException) -> None:
        """Wait until the device leaves alone what it was given, and keep what went wrong."""
        self._pipeline.settle()
        self._error = self._error or error

    def __del__(self) -> None:
        # One that nobody asked for its verdict. `finished` tells when its control may be used again.
        if getattr(self, "_handed_over", False) and self._finished.is_set() and not self._known:
            self._controls.give_back(self._control)

    # What the copy thread does.

    def _start(self) -> None:
        driver, control, pipeline = self._driver, self._control, self._pipeline
        try:
            driver.wait(pipeline.kernels, control.started)
            driver.upload(control.material, control.key, pipeline.uploads)
            driver.record(control.sent, pipeline.uploads)
            driver.wait(pipeline.kernels, control.sent)
            driver.fill(control.verdict, 0xFF, control.answer.size, pipeline.kernels)
            driver.launch(f"prepare_{self._bits}", 1, [control.material, control.state], pipeline.kernels)
            driver.synchronize(control.sent)
            if self._timeline is not None:
                self._clock = Clock(self._timeline, driver, pipeline.uploads)
        except Exception as error:  # noqa: BLE001 - told by `verdict`
            self.fail(error)
        finally:
            control.forget()

    def _open(
        self,
        slot: CudaSlot,
        slab: Slab,
        size: int,
        kernel: str,
        count: int,
        arguments: Sequence[int],
        issued: threading.Event,
    ) -> None:
        driver, control, pipeline = self._driver, self._control, self._pipeline
        arguments = [control.state, slot.twin, *arguments, control.verdict]
        start = time.perf_counter_ns()
        try:
            if self._error is None:
                driver.wait(pipeline.uploads, slot.used)
                with self._shown("copy", "uploads", pipeline.uploads, slab):
                    driver.upload(slot.twin, slot.memory[:size], pipeline.uploads)
                driver.record(slot.copied, pipeline.uploads)
                driver.wait(pipeline.kernels, slot.copied)
                with self._shown("open", "kernels", pipeline.kernels, slab):
                    driver.launch(f"{kernel}_{self._bits}", min(count, self._blocks), arguments, pipeline.kernels)
                driver.record(slot.used, pipeline.kernels)
        except Exception as error:  # noqa: BLE001 - told by `verdict`
            self.fail(error)
        finally:
            issued.set()
            self._show_issue(slab, start)

    def _seal(self, slot: CudaSlot, slab: Slab, count: int, arguments: Sequence[int], issued: threading.Event) -> None:
        driver, pipeline = self._driver, self._pipeline
        arguments = [self._control.state, *arguments]
        start = time.perf_counter_ns()
        try:
            if self._error is None:
                # The twin is free: whoever has the slot has waited for its last copy, and kernels follow each other.
                with self._shown("seal", "kernels", pipeline.kernels, slab):
                    driver.launch(f"seal_{self._bits}", min(count, self._blocks), arguments, pipeline.kernels)
                driver.record(slot.used, pipeline.kernels)
                driver.wait(pipeline.downloads, slot.used)
                with self._shown("copy", "downloads", pipeline.downloads, slab):
                    driver.download(slot.memory[: slab.sealed], slot.twin, pipeline.downloads)
                driver.record(slot.copied, pipeline.downloads)
        except Exception as error:  # noqa: BLE001 - told by `verdict`
            self.fail(error)
        finally:
            issued.set()
            self._show_issue(slab, start)

    def _shown(self, name: str, row: str, stream: Stream, slab: Slab) -> AbstractContextManager[None]:
        """When the device does what the block puts on a stream, if a timeline wants to know."""
        return nullcontext() if self._clock is None else self._clock.span(name, row, stream, slab.detail)

    def _show_issue(self, slab: Slab, start: int) -> None:
        if self._timeline is not None:
            self._timeline.add("issue", start, time.perf_counter_ns(), slab.detail)

    def _finish(self) -> None:
        driver, control, kernels = self._driver, self._control, self._pipeline.kernels
        try:
            if self._error is None:
                driver.download(control.answer, control.verdict, kernels)
            control.clear(driver, kernels)
            driver.record(control.finished, kernels)
            # Even after a failure: a slab from before it may be under way, and the array's memory free soon.
            driver.wait(self._stream, control.finished)
        except Exception as error:  # noqa: BLE001 - told by `verdict`
            self.fail(error)
            self._wipe_again()
        finally:
            self._array = None
            self._finished.set()

    def _wipe_again(self) -> None:
        """Wipe the key after something else failed, if the device still can."""
        try:
            self._control.clear(self._driver, self._pipeline.kernels)
            self._pipeline.settle()
        except Exception as error:  # noqa: BLE001 - told by `verdict`
            self._error = self._error or error

    # What the caller's thread does.

    def _submit(self, slot: CudaSlot, job: partial[None]) -> None:
        issued = slot.lend(self.fail)
        try:
            self._pipeline.submit(partial(job, issued))
        except FastrackError:
            issued.set()
            raise
        except BaseException:  # an interrupt: it may have been submitted
            self._pipeline.submit_after_all(issued.set)
            raise

    def _require_good(self) -> None:
        if self._error is not None:
            raise DeviceError(f"{self._driver.name} failed: {self._error}") from self._error

    def _require_run(self, slab: Slab, slot: CudaSlot) -> int:
        """Count the chunks of a slab that lies within its message and its slot. The kernels rely on this check."""
        count = chunks_between(slab.sealed, slab.stop - slab.start, slab.first)
        if slab.start != slab.first * CHUNK or not slab.stop <= self._size or not slab.sealed <= slot.memory.size:
            raise ValueError(f"a slab reaches outside its message or its slot: {slab}")
        return count

    def _require_gather(self, slab: Slab, pieces: Pieces, slot: CudaSlot) -> int:
        """Count the chunks of a gather that reaches for nothing it may not. The kernels rely on this check."""
        check_pieces(pieces, raw_size(slab.stop), slab.stop, self._size)
        count = pieces.chunks.size
        ends = np.arange(count) * STRIDE + np.minimum(slab.stop - pieces.chunks * CHUNK, CHUNK) + TAG
        if (count and ends.max() > slab.sealed) or align(slab.sealed) + _plan_size(pieces) > slot.memory.size:
            raise ValueError("a gather does not fit into its slot, with its plan behind its chunks")
        return count

    def _write_plan(self, slab: Slab, pieces: Pieces, slot: CudaSlot) -> list[int]:
        """Put the plan behind the chunks, to go with them. Where its parts will be on the device, and its end here."""
        places, start = [], align(slab.sealed)
        for part in (pieces.chunks, pieces.starts, pieces.table):
            places.append(slot.twin + start)
            slot.memory[start : start + part.nbytes].view(np.int64)[:] = part.reshape(-1)
            start += part.nbytes
        return [*places, start]


def _plan_size(pieces: Pieces) -> int:
    return pieces.chunks.nbytes + pieces.starts.nbytes + pieces.table.nbytes
