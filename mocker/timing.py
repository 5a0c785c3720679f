"""Timing models: how long a pass takes, in place of the default polynomial.

`MockEngineArgs(timing_model=...)` takes any of these; `planner_profile_data` (a file) and `aic_backend` (measured GPU
data, see `mocker.aic`) make one from the other arguments. All are thin over the compiled models of `mocker._models`.
What each costs and the formulas are in ``docs/timing.md``.
"""
from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ._models import AddressModel, CompiledModel, FormulaModel, GridModel, MemoModel, capsule_address

if TYPE_CHECKING:
    from .args import MockEngineArgs

__all__ = ["FormulaTiming", "FunctionTiming", "GridTiming", "TimingModel", "engine_timing", "load_timing",
           "with_blocks"]

PathLike = str | os.PathLike[str]
FORMULA_FORMAT = "mocker-timing-1"
LONGEST_MS = 9e12                       # of one pass: what the clock can hold


class TimingModel:
    """How long passes take; the base of all models.

    Both functions give ms before `speedup_ratio`, as an engine uses them: a prefill takes no negative time, a decode
    step at least 1 ms.
    """

    core: CompiledModel

    def prefill_ms(self, batch: int, tokens: int, prefix: int = 0) -> float:
        """Time of the prefill part of a pass, ms.

        Parameters
        ----------
        batch : int
            Prompts computed in the pass.
        tokens, prefix : int
            New tokens and cached tokens of each, means rounded down.
        """
        return self.core.prefill_ms(batch, tokens, prefix)

    def decode_ms(self, batch: int, kv_tokens: int, context: int) -> float:
        """Time of the decode part of a pass, ms.

        Parameters
        ----------
        batch : int
            Requests that get a token.
        kv_tokens : int
            Tokens of the blocks that are held in the pool.
        context : int
            Tokens of each request so far, mean rounded down.
        """
        return self.core.decode_ms(batch, kv_tokens, context)


def _axis(name: str, values: NDArray[np.float64], where: str) -> None:
    if values.ndim != 1:
        raise ValueError(f"{where}: {name} must have one dimension, got shape {values.shape}")
    if len(values) < 2:
        raise ValueError(f"{where}: {name} needs at least 2 points, got {len(values)}")
    steps = np.diff(values)
    if not (steps > 0).all():
        at = int(np.argmin(steps > 0))
        what = "repeats" if values[at + 1] == values[at] else "falls"
        raise ValueError(f"{where}: {name} must rise strictly, but {what} at index {at + 1}: "
                         f"{values[at]:g}, {values[at + 1]:g}")


def _times(name: str, values: NDArray[np.float64], shape: tuple[int, ...], axes: str, where: str) -> None:
    if values.shape != shape:
        raise ValueError(f"{where}: {name} must have shape {shape}, the lengths of {axes}, got {values.shape}")
    if not ((values >= 0) & (values < LONGEST_MS)).all():
        at = np.unravel_index(int(np.argmin((values >= 0) & (values < LONGEST_MS))), shape)
        place = ", ".join(str(int(i)) for i in at)
        raise ValueError(f"{where}: {name}[{place}] must be ms from 0 to {LONGEST_MS:g}, got {values[at]:g}")


class GridTiming(TimingModel):
    """Interpolated profile, the reference's `planner_profile_data`.

    Prefill time is linear in batch * new tokens; decode time is bilinear in the pool's KV tokens and the mean length.
    Outside the grid the last segments go on.

    Parameters
    ----------
    prefill_isl, prefill_ttft_ms : array, shape (n,)
        Tokens and ms.
    decode_active_kv_tokens, decode_context_length : array, shapes (a,), (c,)
    decode_itl : array, shape (a, c)
        ms.
    name : str
        What errors call it.

    Raises
    ------
    ValueError
        An array has the wrong shape, an axis does not rise strictly, or a time is negative or not finite.
    """

    ARRAYS: ClassVar[tuple[str, ...]] = (
        "prefill_isl", "prefill_ttft_ms", "decode_active_kv_tokens", "decode_context_length", "decode_itl")

    def __init__(self, prefill_isl: Any, prefill_ttft_ms: Any, decode_active_kv_tokens: Any,
                 decode_context_length: Any, decode_itl: Any, name: str = "profile") -> None:
        given = (prefill_isl, prefill_ttft_ms, decode_active_kv_tokens, decode_context_length, decode_itl)
        arrays = []
        for what, value in zip(self.ARRAYS, given, strict=True):
            array = np.asarray(value)
            if array.dtype.kind not in "iuf":
                raise ValueError(f"{name}: {what} must hold real numbers, got {array.dtype}")
            array = np.ascontiguousarray(array, np.float64)
            if not np.isfinite(array).all():
                raise ValueError(f"{name}: {what} holds {array[~np.isfinite(array)].flat[0]}; all must be finite")
            array.flags.writeable = True
            arrays.append(array.copy())
        isl, ttft, kv, context, itl = arrays
        for what, axis in (("prefill_isl", isl), ("decode_active_kv_tokens", kv), ("decode_context_length", context)):
            _axis(what, axis, name)
        _times("prefill_ttft_ms", ttft, isl.shape, "prefill_isl", name)
        _times("decode_itl", itl, (len(kv), len(context)), "decode_active_kv_tokens and decode_context_length", name)
        self.name = name
        self.arrays: dict[str, NDArray[np.float64]] = dict(zip(self.ARRAYS, arrays, strict=True))
        self.core = GridModel(isl, ttft, kv, context, itl)

    @classmethod
    def load(cls, path: PathLike) -> GridTiming:
        """Read an NPZ file with the five arrays.

        Raises
        ------
        ValueError
            The file is no profile; the message names it and the array.
        OSError
            It cannot be read.
        """
        from zipfile import BadZipFile  # slow to import, and rarely needed

        where = os.fspath(path)
        try:
            with open(where, "rb") as file, np.load(file, allow_pickle=False) as data:
                if not isinstance(data, np.lib.npyio.NpzFile):
                    raise ValueError(f"{where}: not an NPZ file")
                missing = [name for name in cls.ARRAYS if name not in data]
                if missing:
                    raise ValueError(f"{where}: the profile lacks {', '.join(missing)}; it has "
                                     f"{', '.join(sorted(data.files)) or 'nothing'}")
                arrays = []
                for name in cls.ARRAYS:
                    try:
                        arrays.append(data[name])
                    except (ValueError, EOFError, BadZipFile) as error:
                        raise ValueError(f"{where}: {name} cannot be read: {error}") from None
        except (BadZipFile, EOFError) as error:
            raise ValueError(f"{where}: not an NPZ file: {error}") from None
        except ValueError as error:
            if str(error).startswith(where):
                raise
            raise ValueError(f"{where}: not an NPZ file: {error}") from None
        isl, ttft, kv, context, itl = arrays
        return cls(isl, ttft, kv, context, itl, where)

    def save(self, path: PathLike) -> None:
        """Write the NPZ file that `load` and the reference read."""
        with open(path, "wb") as file:
            np.savez(file, **self.arrays)  # type: ignore[arg-type]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (*self.arrays.values(), self.name)

    def __repr__(self) -> str:
        kv, context = self.arrays["decode_itl"].shape
        return f"GridTiming({self.name!r}: {len(self.arrays['prefill_isl'])} prefill points, {kv} x {context} decode)"


class FormulaTiming(TimingModel):
    """Sums of fixed terms, what `mocker.calibrate` fits.

    Parameters
    ----------
    prefill : sequence of 4 float
        ms for 1, T, T**2 and T * (prefix + tokens / 2), where T = batch * tokens.
    decode : sequence of 5 float
        ms for 1, batch, K, K**2 and batch * context, where K is the pool's KV tokens.
    about : mapping, optional
        Where it comes from: kept in the file, not used.
    """

    PREFILL_TERMS: ClassVar[tuple[str, ...]] = ("constant", "tokens", "tokens_squared", "attention")
    DECODE_TERMS: ClassVar[tuple[str, ...]] = ("constant", "batch", "kv_tokens", "kv_tokens_squared", "context_sum")

    def __init__(self, prefill: Sequence[float], decode: Sequence[float],
                 about: Mapping[str, Any] | None = None) -> None:
        self.prefill, self.decode = tuple(map(float, prefill)), tuple(map(float, decode))
        for name, values, terms in (("prefill", self.prefill, self.PREFILL_TERMS),
                                    ("decode", self.decode, self.DECODE_TERMS)):
            if len(values) != len(terms) or not np.isfinite(values).all():
                raise ValueError(f"{name} needs {len(terms)} finite coefficients ({', '.join(terms)}), got {values}")
        self.about = dict(about or {})
        self.core = FormulaModel(self.prefill, self.decode)

    @classmethod
    def load(cls, path: PathLike) -> FormulaTiming:
        """Read a JSON file of `save`.

        Raises
        ------
        ValueError
            The file is no such profile; the message names it and the field.
        OSError
            It cannot be read.
        """
        where = os.fspath(path)
        try:
            with open(where, encoding="utf-8") as file:
                data = json.load(file)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{where}: not a JSON file: {error}") from None
        if not isinstance(data, dict) or data.get("format") != FORMULA_FORMAT:
            raise ValueError(f"{where}: not a timing profile: it needs \"format\": \"{FORMULA_FORMAT}\"")
        values = []
        for part, terms in (("prefill_ms", cls.PREFILL_TERMS), ("decode_ms", cls.DECODE_TERMS)):
            given = data.get(part)
            if not isinstance(given, dict):
                raise ValueError(f"{where}: {part} must be an object with {', '.join(terms)}")
            unknown = [name for name in given if name not in terms]
            if unknown:
                raise ValueError(f"{where}: {part} has unknown terms {', '.join(unknown)}; known: {', '.join(terms)}")
            for name in terms:
                value = given.get(name, 0.0)
                if isinstance(value, bool) or not isinstance(value, (int, float)) or not np.isfinite(value):
                    raise ValueError(f"{where}: {part}.{name} must be a finite number, got {value!r}")
            values.append([float(given.get(name, 0.0)) for name in terms])
        about = data.get("about")
        return cls(values[0], values[1], about if isinstance(about, dict) else None)

    def save(self, path: PathLike) -> None:
        """Write a JSON file that `load` reads."""
        data = {"format": FORMULA_FORMAT, "prefill_ms": dict(zip(self.PREFILL_TERMS, self.prefill, strict=True)),
                "decode_ms": dict(zip(self.DECODE_TERMS, self.decode, strict=True)), "about": self.about}
        with open(path, "w", encoding="utf-8") as file:
            json.dump(data, file, indent=2)
            file.write("\n")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.prefill, self.decode, self.about)

    def __repr__(self) -> str:
        return f"FormulaTiming(prefill={self.prefill}, decode={self.decode})"


def function_address(what: str, function: Any, numbers: int = 3) -> int | None:
    """Address of a compiled function of so many int64 that gives a float64, or None if it is a Python callable.

    Raises
    ------
    TypeError
        It is neither, or has another signature.
    """
    if isinstance(function, (int, np.integer)) and not isinstance(function, bool):
        return int(function)
    if type(function).__name__ == "PyCapsule":
        return capsule_address(function, numbers)
    address = getattr(function, "address", None)
    if address is not None and hasattr(function, "native_name"):      # numba's CFunc, without importing it
        kinds = [str(kind) for kind in function._sig.args]
        if kinds != ["int64"] * numbers or str(function._sig.return_type) != "float64":
            raise TypeError(f"{what} must be a cfunc of float64({', '.join(['int64'] * numbers)}), got {function._sig}")
        return int(address)
    if callable(function):
        return None
    raise TypeError(f"{what} must be callable, a Numba cfunc, a capsule or an address, got {type(function).__name__}")


class FunctionTiming(TimingModel):
    """Times from the user's own functions.

    Parameters
    ----------
    prefill, decode : callable, Numba CFunc, capsule or int
        Functions of three integers with the meaning of `TimingModel.prefill_ms` and `.decode_ms`, that return ms.
        Compiled ones are called without the GIL, each time: a Numba ``@cfunc("float64(int64, int64, int64)")``, a
        Cython function by its capsule in ``__pyx_capi__`` (``double f(int64_t, int64_t, int64_t) noexcept nogil``),
        or an address. A Python callable is called once for each distinct question of a process.
    vectorized : bool
        The callables take three equal int64 arrays and return an array. Decode is then asked for 64 consecutive
        lengths at once.
    uses_kv_tokens : bool
        Decode depends on the pool's KV tokens. Without, Python functions are asked far less often, and get 0.
    uses_context : bool
        Decode depends on the mean length. Without, a compiled one is asked once for a stretch of passes instead of
        every pass, and Python functions get 0.

    Raises
    ------
    TypeError
        One is not callable, has another signature, or only one of them is compiled.

    Notes
    -----
    A Python function must give the same answer to the same question. What it raises ends the replay and comes out of
    it; a time that is negative or not finite is a `ValueError`. A compiled function that gives such a time ends the
    replay with `OverflowError` (a negative one counts as 0).
    """

    def __init__(self, prefill: Any, decode: Any, *, vectorized: bool = False, uses_kv_tokens: bool = True,
                 uses_context: bool = True) -> None:
        first, second = function_address("prefill", prefill), function_address("decode", decode)
        self._given = (prefill, decode, vectorized, uses_kv_tokens, uses_context)
        if (first is None) != (second is None):
            raise TypeError("prefill and decode must both be compiled functions, or both Python callables")
        if first is not None and second is not None:
            if vectorized:
                raise TypeError("compiled functions cannot be vectorized")
            self.core = AddressModel(first, second, uses_context, (prefill, decode))
            return
        self.core = MemoModel(prefill, decode, uses_kv_tokens, uses_context,
                              64 if vectorized and uses_context else int(vectorized))

    def __reduce__(self) -> tuple[Any, ...]:
        return _function_timing, self._given

    def __repr__(self) -> str:
        return f"FunctionTiming({self._given[0]!r}, {self._given[1]!r})"


def _function_timing(prefill: Any, decode: Any, vectorized: bool, uses_kv_tokens: bool,
                     uses_context: bool) -> FunctionTiming:
    return FunctionTiming(prefill, decode, vectorized=vectorized, uses_kv_tokens=uses_kv_tokens,
                          uses_context=uses_context)


def load_timing(path: PathLike) -> TimingModel:
    """Read a profile: the reference's NPZ arrays, a folder of profiler results, or a JSON file of `mocker calibrate`.

    Raises
    ------
    ValueError
        The file is no profile; the message names it and what is wrong.
    OSError
        It cannot be read.
    """
    where = os.fspath(path)
    if os.path.isdir(where):
        from .profiler_results import load_profiler_folder

        return load_profiler_folder(where)
    return FormulaTiming.load(where) if where.endswith(".json") else GridTiming.load(where)


def with_blocks(args: MockEngineArgs) -> MockEngineArgs:
    """Engine arguments whose number of KV blocks is given: with `aic_backend` as many as fit the GPUs' memory.

    Raises
    ------
    ValueError
        They have to be estimated and cannot be.
    """
    if args.aic_backend is None or not args.blocks_by_default():
        return args
    from .aic import estimate_blocks

    return args.replace(num_gpu_blocks=estimate_blocks(args))


_loaded: dict[tuple[Any, ...], TimingModel] = {}


def _stamp(path: str) -> tuple[Any, ...]:
    """What changes when a profile does: of a folder, all files two levels deep."""
    status = os.stat(path)
    files: tuple[Any, ...] = ()
    if os.path.isdir(path):
        files = tuple(sorted((entry.path, entry.stat().st_mtime_ns, entry.stat().st_size)
                             for folder in (path, *(e.path for e in os.scandir(path) if e.is_dir()))
                             for entry in os.scandir(folder) if entry.is_file()))
    return os.path.abspath(path), status.st_mtime_ns, status.st_size, files


def engine_timing(args: MockEngineArgs) -> CompiledModel | None:
    """The compiled model that these arguments ask for, or None for the polynomial.

    Raises
    ------
    ValueError
        They ask for several, the profile is bad, or its model, system or version is unknown.
    """
    if args.timing_model is not None:
        for name in ("planner_profile_data", "aic_backend"):
            if getattr(args, name) is not None:
                raise ValueError(f"timing_model and {name} are both set; leave one of them out")
        core: CompiledModel = args.timing_model.core
        return core
    if args.aic_backend is not None:           # wins over a profile, as in the reference
        from .aic import AicPerfConfig, aic_timing

        return aic_timing(AicPerfConfig.of(args)).core
    if args.planner_profile_data is None:
        return None
    try:
        key = _stamp(args.planner_profile_data)
    except OSError as error:
        raise ValueError(f"planner_profile_data: {error.strerror}: {args.planner_profile_data}") from None
    if key not in _loaded:
        _loaded[key] = load_timing(args.planner_profile_data)
    return _loaded[key].core
