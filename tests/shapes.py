"""A type checker for jaxtyping's import hook that looks at arrays alone: their shapes and dtypes, as signatures have them."""

import functools
import inspect
import sys
import types
import typing

from jaxtyping import AbstractArray

SHAPES_FLAG = "--check-shapes"
CHECKED = ("dsjax.model", "sharding")
"""Packages whose arrays are checked then."""


def check_arrays(function):
    """Make ``function`` raise ``TypeError`` where an array is not what its annotation says.

    NumPy's arrays and descriptions of arrays count as JAX's do. Anything else passes: JAX puts specs, or ``None``, where a tree has arrays.
    """
    signature, module = inspect.signature(function), sys.modules.get(function.__module__)

    @functools.cache
    def hints(name: str) -> list[type]:
        """The arrays that a parameter, or the ``return``, may be; none where it may be something else, too."""
        hint = signature.return_annotation if name == "return" else signature.parameters[name].annotation
        if isinstance(hint, str):
            try:
                hint = eval(hint, vars(module))
            except NameError:  # imported for type checkers alone
                return []
        options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        options = [one for one in options if one is not types.NoneType]
        if not all(isinstance(one, type) and issubclass(one, AbstractArray) for one in options):
            return []
        return [one.dtype[typing.Any, one.dim_str] for one in options]

    def check(name: str, value: object) -> None:
        is_array = bool(hints(name)) and hasattr(value, "shape") and hasattr(value, "dtype")
        if is_array and not any(isinstance(value, hint) for hint in hints(name)):
            raise TypeError(f"{name} of {function.__qualname__} is {value.dtype}{list(value.shape)}")

    @functools.wraps(function)
    def checked(*args, **kwargs):
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            check(name, value)
        result = function(*args, **kwargs)
        check("return", result)
        return result

    return checked
