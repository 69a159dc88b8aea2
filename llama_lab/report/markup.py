"""Text and tables as Markdown and LaTeX, with all special characters escaped."""

import re
import textwrap

from .tables import Table

# LaTeX's special characters, and those that pdfTeX's default encoding lacks.
LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "\u2212": "$-$",
    "\u00d7": r"$\times$",
    "\u00b1": r"$\pm$",
    "\u2013": "--",
    "\u2026": r"\ldots{}",
    "\u03b1": r"$\alpha$",
    "\u03b2": r"$\beta$",
    "\u03b3": r"$\gamma$",
    "\u00a0": "~",
    "--": "-{}-",  # which would be a dash
} | {character: f"\\{character}" for character in "{}$&#_%"}
LATEX_SPECIAL = re.compile("|".join(map(re.escape, sorted(LATEX, key=len, reverse=True))))
MARKDOWN_SPECIAL = re.compile(r"[\\`*_|<>]")
LONG = 40  # characters above which a column of text wraps
HEAD = 16  # characters per line of a column's title


def latex(text: str) -> str:
    """Text, escaped for LaTeX."""
    return LATEX_SPECIAL.sub(lambda found: LATEX[found[0]], text)


def markdown(text: str) -> str:
    """Text, escaped for Markdown."""
    return MARKDOWN_SPECIAL.sub(r"\\\g<0>", text)


def markdown_table(table: Table) -> str:
    """A table in Markdown, with its caption below."""

    def row(cells: list[str]) -> str:
        return f"| {' | '.join(markdown(cell).replace(chr(10), '<br>') for cell in cells)} |"

    rule = [":--" if is_text else "--:" for is_text in _texts(table)]
    lines = [row(table.head), f"| {' | '.join(rule)} |", *map(row, table.rows)]
    return "\n".join([*lines, "", markdown(table.caption), ""])


def latex_table(table: Table, label: str) -> str:
    """A table in LaTeX across both columns of a page, with notes on lines of their own."""
    longest = [max(map(len, "\n".join(cells).split("\n"))) for cells in zip(table.head, *table.rows, strict=True)]
    texts = _texts(table)
    columns = [
        "r" if not is_text else r"p{0.3\textwidth}" if length > LONG else "l"
        for is_text, length in zip(texts, longest, strict=True)
    ]

    def row(cells: list[str]) -> str:
        return f"{' & '.join(_latex_cell(cell, column) for cell, column in zip(cells, columns, strict=True))} \\\\"

    head = ["\n".join(textwrap.wrap(name, HEAD)) for name in table.head]
    rows = [
        [cell.replace("; ", "\n") if column == "r" else cell for cell, column in zip(cells, columns, strict=True)]
        for cells in table.rows
    ]
    return "\n".join(
        [
            r"% \usepackage{adjustbox, booktabs}",
            r"\begin{table*}",
            r"\centering\footnotesize",
            rf"\caption{{{latex(table.caption)}}}",
            rf"\label{{tab:{label}}}",
            r"\begin{adjustbox}{max width=\textwidth}",
            rf"\begin{{tabular}}{{{''.join(columns)}}}",
            r"\toprule",
            row(head),
            r"\midrule",
            *map(row, rows),
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{adjustbox}",
            r"\end{table*}",
            "",
        ]
    )


def _texts(table: Table) -> list[bool]:
    """Whether each column holds text; the first one always does."""
    return [i == 0 or name in table.words for i, name in enumerate(table.head)]


def _latex_cell(cell: str, column: str) -> str:
    lines = [_guarded(latex(line)) for line in cell.split("\n")]
    if len(lines) == 1:
        return lines[0]
    if column.startswith("p"):
        return r"\newline ".join(lines)
    stacked = r" \\ ".join(lines)
    return rf"\begin{{tabular}}[t]{{@{{}}{column}@{{}}}}{stacked}\end{{tabular}}"


def _guarded(line: str) -> str:
    r"""A line that a preceding \\ does not read as its argument."""
    return f"{{}}{line}" if line.startswith(("[", "*")) else line
