"""`Tape`: a module like `pickle` whose pickler runs once, and writes the same again the next time."""

from __future__ import annotations

import io
from typing import Any


class Tape:
    """Stand for a module of pickles where torch saves twice: first to count bytes, and then to seal them.

    Objects may pickle otherwise the second time, such as those that seal a part of themselves, whose bytes are random.
    So the first pickle is kept, without the storages, which torch takes out of it by their persistent ids.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._pickle = io.BytesIO()
        self._taken_out: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    @property
    def Pickler(self) -> type:  # noqa: N802 - the name in `pickle`
        """The base class of torch's pickler."""
        return self._player() if self._pickle.tell() else self._recorder()

    def _recorder(tape) -> type:  # noqa: N805 - not the pickler
        class Recorder(tape._module.Pickler):  # type: ignore[misc,name-defined]
            def __init_subclass__(cls) -> None:
                persistent_id = cls.persistent_id

                def noted(self: Any, obj: Any) -> Any:
                    found = persistent_id(self, obj)
                    if found is not None:
                        tape._taken_out.append(obj)
                    return found

                cls.persistent_id = noted

            def __init__(self, file: Any, *args: Any, **options: Any) -> None:
                self.__file = file  # by a name of its own: dill's pickler has a `_file`
                super().__init__(tape._pickle, *args, **options)

            def dump(self, obj: Any) -> Any:
                result = super().dump(obj)
                self.__file.write(tape._pickle.getvalue())
                return result

        return Recorder

    def _player(tape) -> type:  # noqa: N805
        class Player:
            def __init__(self, file: Any, *_: Any, **__: Any) -> None:
                self._file = file

            def persistent_id(self, obj: Any) -> Any:
                raise NotImplementedError

            def dump(self, _: Any) -> None:
                for obj in tape._taken_out:  # in this order torch writes them
                    self.persistent_id(obj)
                self._file.write(tape._pickle.getvalue())

        return Player
