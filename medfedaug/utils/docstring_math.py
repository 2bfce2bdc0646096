"""The formulas of docstrings as a line of text, for a terminal."""

from __future__ import annotations

import re
import unicodedata
from collections import deque

_TOKEN = re.compile(r"\\[a-zA-Z]+|\\.|[0-9]+(?:\.[0-9]+)?|\s+|.", re.DOTALL)
_GREEK = {
    **{"alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "epsilon": "ε", "varepsilon": "ε", "zeta": "ζ"},
    **{"eta": "η", "theta": "θ", "kappa": "κ", "lambda": "λ", "mu": "μ", "nu": "ν", "xi": "ξ", "pi": "π"},
    **{"rho": "ρ", "sigma": "σ", "tau": "τ", "phi": "φ", "varphi": "φ", "psi": "ψ", "omega": "ω"},
    **{"Gamma": "Γ", "Delta": "Δ", "Theta": "Θ", "Lambda": "Λ", "Sigma": "Σ", "Phi": "Φ", "Psi": "Ψ"},
    **{"Omega": "Ω", "ell": "ℓ", "nabla": "∇", "partial": "∂", "infty": "∞"},
}
_BETWEEN = {  # operators and relations, with a space on either side
    **{"sim": "~", "in": "∈", "leftarrow": "←", "mapsto": "↦", "to": "→", "rightarrow": "→", "propto": "∝"},
    **{"le": "≤", "leq": "≤", "ge": "≥", "geq": "≥", "ne": "≠", "neq": "≠", "approx": "≈", "odot": "⊙"},
    **{"times": "×", "cdot": "·", "circ": "∘", "pm": "±", "ast": "*"},
    **{"=": "=", "+": "+", "-": "−", "<": "<", ">": ">", "&": "", "*": "*"},
}
_WORDS = ("min", "max", "log", "exp", "cos", "sin", "arg", "argmin", "argmax", "sup", "inf", "det")
_MARKS = {
    **{"lVert": "\x00‖", "rVert": "‖\x01", "lvert": "\x00|", "rvert": "|\x01", "lfloor": "⌊", "rfloor": "⌋"},
    **{"Vert": " ‖ ", "mid": " | ", "prime": "′", "top": "ᵀ", "dots": "…", "ldots": "…", "cdots": "…"},
    **{"{": "{", "}": "}", "|": "‖", "%": "%", "_": "_", "!": "", "quad": "\t", "qquad": "\t", "\\": ";\t"},
    **dict.fromkeys((",", ";", ":", " "), " "),
}
_SIZES = re.compile(r"(?:[bB]ig|left|right)[lrg]?|displaystyle|limits")
_ACCENTS = {"hat": "\u0302", "bar": "\u0304", "overline": "\u0304", "tilde": "\u0303", "dot": "\u0307"}
_PLAIN = ("mathrm", "mathcal", "mathbb", "mathbf", "text", "operatorname", "textrm", "boldsymbol")
_RAISED = dict(zip("0123456789−+T", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ᵀ", strict=True))
_LOWERED = dict(zip("0123456789", "₀₁₂₃₄₅₆₇₈₉", strict=True))
_WHOLE = re.compile(
    r"[0-9.]+|√\w|√?\([^()]*\)|\x00[^\x00\x01]*\x01"  # numbers, roots, norms
    r"|\w[\u0300-\u036f]*′?(?:_(?:\w+|\([^()]*\))|[₀-₉])?[²³]?"  # a symbol with its index
)


def formula_text(latex: str) -> str:
    r"""Write a formula as a line of text; unknown commands stay as they are.

    Example:
        >>> formula_text(r"\hat x = \gamma\,\frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} + \beta_1")
        'x̂ = γ (x − μ)/√(σ² + ε) + β₁'
    """
    text = _sequence(deque(_TOKEN.findall(latex)))
    text = re.sub(r" *([‖|])\x01", r"\1", re.sub(r" *\x00([‖|]) *", r" \1", text))
    text = re.sub(r"(?<=/) (?=[‖|])", "", re.sub(r" +", " ", text)).strip()
    text = re.sub(r"(?<=[(\[{⌊]) | (?=[)\]}⌋,.;])", "", text)
    text = re.sub(r"(^|[(\[{,=∈~←↦→∝≤≥<>|/\t] ?)− ", r"\1−", text)  # a sign, not an operator
    return unicodedata.normalize("NFC", re.sub(r" *\t *", "   ", text).strip())


def _sequence(tokens: deque[str], end: str = "") -> str:
    """Return the text of tokens up to an end."""
    text, limits = "", False
    while tokens:
        token = tokens.popleft()
        if token == end:
            break
        if token in ("^", "_"):
            text = text.rstrip() + _script(token, _operand(tokens), limits)
        else:
            text += _text(token, tokens)
            limits = token == "\\sum"
    return text


def _operand(tokens: deque[str]) -> str:
    """Return the text of one argument: a group in braces, or one token, of a number its first digit."""
    while tokens and tokens[0].isspace():
        tokens.popleft()
    token = tokens.popleft() if tokens else ""
    if token[1:].isdigit():
        tokens.appendleft(token[1:])
        token = token[0]
    return (_sequence(tokens, "}") if token == "{" else _text(token, tokens)).strip()


def _text(token: str, tokens: deque[str]) -> str:
    name = token.removeprefix("\\")
    if token.isspace():
        return " "
    if token == "{":
        return _sequence(tokens, "}")
    if token == "'":
        return "′"
    if name in _BETWEEN and (token.startswith("\\") or name in "=+-<>&*"):
        return f" {_BETWEEN[name]} "
    if not token.startswith("\\"):
        return token
    if name in ("frac", "tfrac", "dfrac"):
        above, below = _operand(tokens), _operand(tokens)
        return f" {_whole(above) if ' ' in above else above}/{_whole(below)} "
    if name == "sqrt":
        return f"√{_whole(_operand(tokens))}"
    if name in _ACCENTS:
        inner = _operand(tokens)
        return inner[:1] + _ACCENTS[name] + inner[1:]
    if name in _PLAIN:
        return _operand(tokens)
    if name == "sum":
        return " Σ"
    if name in _WORDS:
        return f" {name}{_argument(tokens)}"
    if _SIZES.fullmatch(name):
        return ""
    return _GREEK.get(name) or _MARKS.get(name, token)


def _argument(tokens: deque[str]) -> str:
    """Return the text between a function's name and its argument: a fraction in brackets, or a space."""
    while tokens and (tokens[0].isspace() or _SIZES.fullmatch(tokens[0].removeprefix("\\"))):
        tokens.popleft()
    if tokens and tokens[0] == "\\frac":
        return f"({_text(tokens.popleft(), tokens).strip()})"
    return "" if tokens and tokens[0] in ("(", "^", "_") else " "


def _script(kind: str, inner: str, limits: bool) -> str:
    inner = inner.replace(" ", "")
    table = _RAISED if kind == "^" else _LOWERED
    if not limits and inner and set(inner) <= table.keys():
        return "".join(table[character] for character in inner)
    bare = len(inner) == 1 or inner.isalpha() or re.fullmatch(r"\([^()]*\)", inner)
    return f"{kind}{inner}" if bare else f"{kind}({inner})"


def _whole(text: str) -> str:
    """Put brackets around more than a number or a symbol."""
    return text if _WHOLE.fullmatch(text) else f"({text})"
