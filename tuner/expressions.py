"""Expressions of whole numbers: how a launch follows from sizes, in a form that any language reads.

    expression = term { ("+" | "-") term }
    term       = factor { "*" factor }
    factor     = number | name | function "(" expression { "," expression } ")"
               | "(" expression ")"

Functions: `ceil_div(a, b)` and `floor_div(a, b)` are a / b rounded up and down, `round_up(a, b)` is
the smallest multiple of b from a on; `min` and `max` take two or more. Divisors are above 0.
Numbers are whole; 64 bits with a sign hold all that occurs.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Mapping

from tuner.errors import UsageError

FUNCTIONS: Mapping[str, Callable[..., int]] = {
    "ceil_div": lambda a, b: -(-a // b),
    "floor_div": lambda a, b: a // b,
    "round_up": lambda a, b: -(-a // b) * b,
    "min": min,
    "max": max,
}
"""What an expression may call, by name."""

_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
}


def evaluate(text: str, known: Mapping[str, int]) -> int:
    """The value of an expression, given those of its names.

    Raises:
        UsageError: it is none, has an unknown name or divides by 0; the message has the text.
    """
    try:
        return _value(_parsed(text), known)
    except ZeroDivisionError as error:
        raise UsageError(f"{text!r} divides by 0") from error
    except KeyError as error:
        raise UsageError(f"{text!r} needs {error.args[0]}, which is not known") from error
    except (SyntaxError, TypeError, ValueError) as error:
        raise UsageError(f"{text!r} is no expression: {error}") from error


def renamed(text: str, meanings: Mapping[str, str]) -> str:
    """The expression with other expressions in the place of some of its names."""

    class Renamer(ast.NodeTransformer):
        def visit_Call(self, node: ast.Call) -> ast.expr:
            node.args = [self.visit(each) for each in node.args]
            return node

        def visit_Name(self, node: ast.Name) -> ast.expr:
            return ast.parse(meanings[node.id], mode="eval").body if node.id in meanings else node

    return ast.unparse(Renamer().visit(ast.parse(text, mode="eval").body))


@functools.lru_cache(maxsize=4096)
def _parsed(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _value(node: ast.expr, known: Mapping[str, int]) -> int:
    match node:
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            return number
        case ast.Name(id=name):
            return known[name]
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _OPERATORS:
            return _OPERATORS[type(operator)](_value(left, known), _value(right, known))
        case ast.Call(func=ast.Name(id=name), args=list(given), keywords=[]) if name in FUNCTIONS:
            return FUNCTIONS[name](*(_value(each, known) for each in given))
    raise ValueError(f"{ast.unparse(node)} is not part of the language")
