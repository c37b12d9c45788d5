"""kvtune: generates, validates, times and exports Vulkan kernels for decode attention.

The package is a command line (`tuner`, `python -m tuner`) and one function for those who only want
its results: `load_best_config`. Importing it costs next to nothing; what is heavy is imported by
the modules that need it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from os import PathLike

    from tuner.export.best_config import BestConfig

__version__ = "0.1.0"
__all__ = ["__version__", "load_best_config"]


def load_best_config(path: str | PathLike[str]) -> BestConfig:
    """The tuned configuration in a `best-config.json`, or in a folder that holds one.

    Needs neither Vulkan nor a GPU. `BestConfig.lookup(family, problem)` then gives the variant for
    a problem, the nearest one where that very problem was not tuned.

    Raises:
        InputFileError: the file cannot be read, is no JSON or cut off, is of another schema
            version, or does not follow the schema; the message says where.
    """
    from tuner.export.best_config import load

    return load(path)
