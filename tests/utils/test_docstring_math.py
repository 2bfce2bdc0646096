"""Formulas of docstrings as lines of text, as `medfedaug methods NAME` shows them."""

from __future__ import annotations

import pytest

from medfedaug import functional, models
from medfedaug.cli import catalogue
from medfedaug.methods.registry import built_in_methods
from medfedaug.utils.docstring_math import formula_text
from medfedaug.utils.docstrings import read_docstring


@pytest.mark.parametrize(
    ("latex", "text"),
    [
        (r"\frac{1}{2C} \sum_{i=1}^n x_i^2", "1/(2C) Σ_(i=1)^n x_i²"),
        (r"\frac{w - p}{1 - p}", "(w − p)/(1 − p)"),
        (r"-\log\frac{a_1}{b + c}", "−log(a₁/(b + c))"),
        (r"-\log \bigl( a \bigr), \qquad x \to -x", "−log(a),   x → −x"),
        (r"a \lVert v - w\rVert^2 / b", "a ‖v − w‖² / b"),
        (r"\frac{S}{\lVert\Delta_k\rVert}", "S/‖Δ_k‖"),
        (r"\bar g_l, \hat\sigma, \tilde{x}_0", "ḡ_l, σ̂, x̃₀"),
        (r"\mathcal{F}^{-1}(e^{iP})", "F⁻¹(e^iP)"),
        (r"s^{(b)} \in \{1, \dots, B\}", "s^(b) ∈ {1, …, B}"),
        (r"\tfrac12 \sqrt N \mathrm{KL}(p \,\Vert\, q)", "1/2 √N KL(p ‖ q)"),
        (r"x' = \unheard{x}", r"x′ = \unheardx"),
        ("", ""),
        (r"\frac{", "/()"),
    ],
)
def test_a_formula_as_text(latex, text):
    assert formula_text(latex) == text


def test_all_formulas_of_the_library_are_known():
    """None shows a command of LaTeX."""
    objects = [*built_in_methods().values(), *map(functional.__dict__.get, functional.__all__)]
    for documented in (*objects, *map(models.__dict__.get, models.__all__)):
        if callable(documented):
            doc = read_docstring(documented)
            for text in (doc.summary, *doc.paragraphs, *doc.arguments.values(), *doc.sections.values()):
                assert "\\" not in text, (documented, text)


def test_a_method_is_described_with_its_equation(run):
    text = catalogue.describe_method("fedwon").text
    (formula,) = (paragraph for paragraph in text if paragraph.startswith("    "))
    assert formula == "    Ŵ_i = γ (W_i − μ_i)/(σ_i √N),"
    code, out, _ = run("methods", "ditto")
    assert code == 0
    lines = out.splitlines()
    at = next(k for k, line in enumerate(lines) if "min_v h_k(v; w^t)" in line)
    assert lines[at].startswith("    min_v")
    assert lines[at + 1].startswith("      ")  # what does not fit in a line
    assert not lines[at - 1].strip()
