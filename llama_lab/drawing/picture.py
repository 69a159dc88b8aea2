"""The picture of one architecture, or of two side by side, as SVG: geometry here, looks in the template."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import ascii_uppercase

from llama_lab.model import Cost
from llama_lab.util import formatting as fmt
from llama_lab.util.templates import template

from .anatomy import Anatomy, Layer, Part
from .wiring import Sum

TEMPLATE = Path(__file__).with_name("picture.svg.j2")
ACCENT = "#b84f00"  # of what differs
WIDTH = 390  # of a column; the unit is a pixel, as wide as a point of 12 in a column of text
LEFT, RIGHT = 44, 262  # of the boxes
CENTER = (LEFT + RIGHT) / 2  # of the residual stream
NUMBERS = 282  # where the numbers begin
SKIP, RAIL = 24, 34  # where residual connections and the inputs of parallel branches run
OUT = RIGHT + 8  # where outputs of parallel branches run
GAP = 14  # between boxes
LINE = 13  # of text
IN_BOX, IN_COLUMN = 37, 62  # letters that fit


@dataclass(frozen=True)
class Text:
    """A line of text that starts, or is centred, at a point on its base line. changed: whether the other differs."""

    x: float
    y: float
    text: str
    kind: str = "detail"  # or title, number, caption, heading
    anchor: str = "start"
    changed: bool = False


@dataclass(frozen=True)
class Box:
    """A rectangle. kind: of its part, or frame."""

    x: float
    y: float
    width: float
    height: float
    kind: str
    changed: bool = False


@dataclass(frozen=True)
class Line:
    """A line through points, with an arrow at its end unless it only joins. dashed: acts from outside the stream."""

    points: tuple[tuple[float, float], ...]
    arrow: bool = True
    dashed: bool = False


@dataclass
class Column:
    """One architecture. It is drawn upwards from y = 0, so that two side by side stand on one line."""

    anatomy: Anatomy
    other: Anatomy | None
    y: float = 0
    boxes: list[Box] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    texts: list[Text] = field(default_factory=list)
    sums: list[tuple[float, float]] = field(default_factory=list)

    def draw(self) -> None:
        """The parts, from the tokens up to the logits."""
        one, other = self.anatomy, self.other
        self.label("tokens, up to {context:,}")
        self.part(one.embedding, other.embedding if other else None)
        self.label("T \u00d7 {dim:,}", beside=True)
        if one.position:
            self.position(one.position)
        for i, (layer, numbers) in enumerate(one.layers):
            self.layer(layer, numbers, i)
        if one.order:
            self.label("layers in the order {order}", beside=True)
        if one.norm:
            self.part(one.norm, other.norm if other else None)
        self.part(one.head, other.head if other else None)
        self.stream(GAP)
        self.label("logits, T \u00d7 {vocabulary:,}")

    def label(self, template: str, beside: bool = False) -> None:
        """Words on the stream, or beside it. template: with the names of sizes."""
        words, *others = (template.format(order=one.order, **one.sizes) for one in (self.anatomy, self.other) if one)
        changed = any(other != words for other in others)
        if beside:
            self.texts.append(Text(CENTER + 8, self.y - 7, words, changed=changed))
            self.stream(LINE + 6, arrow=False)
            return
        self.texts.append(Text(CENTER, self.y - 4, words, anchor="middle", changed=changed))
        self.y -= LINE + 4

    def stream(self, length: float, arrow: bool = True) -> None:
        """The stream, up to what comes next."""
        self.lines.append(Line(((CENTER, self.y), (CENTER, self.y - length)), arrow))
        self.y -= length

    def part(self, part: Part, before: Part | None, enters: bool = True) -> float:
        """A box on the stream, with its numbers. Returns its bottom. enters: whether the stream does."""
        if enters:
            self.stream(GAP)
        bottom = self.y
        self.box(part, before, LEFT, RIGHT - LEFT, IN_BOX)
        return bottom

    def box(self, part: Part, before: Part | None, x: float, width: float, letters: int) -> None:
        """A box that stands at the present height."""
        compares, inside, beside = self.other is not None, words(part, letters), numbers(part)
        old, numbered = (words(before, letters), numbers(before)) if before else ([], [])
        height = max(LINE * len(inside), LINE * len(beside) if len(inside) > 1 else LINE) + 9
        self.y -= height
        first = self.y + (height - LINE * len(inside)) / 2 + 10
        for i, line in enumerate(inside):
            kind = "title" if line in textwrap.wrap(part.title, letters) else "detail"
            changed = compares and line not in old
            self.texts.append(Text(x + width / 2, first + LINE * i, line, kind, "middle", changed))
        first = self.y + (height - LINE * len(beside)) / 2 + 10
        for i, line in enumerate(beside):
            changed = compares and line not in numbered
            self.texts.append(Text(NUMBERS, first + LINE * i, line, "number", changed=changed))
        self.boxes.append(Box(x, self.y, width, height, part.kind, compares and not {*inside} <= {*old}))

    def position(self, part: Part) -> None:
        """The position encoding, beside the stream: added to it, or handed to the mixers."""
        before = self.other.position if self.other else None
        x, bottom = CENTER + 22, self.y
        self.y -= 2
        start = self.y
        self.box(part, before, x, RIGHT - x, 15)
        top, middle = self.y, (start + self.y) / 2
        if self.anatomy.added:
            self.lines += [Line(((x, middle), (CENTER + 7, middle))), Line(((CENTER, bottom), (CENTER, middle + 7)))]
            self.sums.append((CENTER, middle))
            self.lines.append(Line(((CENTER, middle - 7), (CENTER, top)), arrow=False))
        else:
            self.lines.append(Line((((x + RIGHT) / 2, top), ((x + RIGHT) / 2, top - GAP)), dashed=True))
            self.lines.append(Line(((CENTER, bottom), (CENTER, top)), arrow=False))

    def layer(self, layer: Layer, layers: Sequence[int], index: int) -> None:
        """A kind of block in its frame."""
        self.stream(GAP)
        bottom = self.y
        kinds = self.other.layers if self.other else ()
        before = kinds[min(index, len(kinds) - 1)] if kinds else None
        old = before[0].parts if before else {}
        for stage in layer.stages or ():
            if isinstance(stage, Sum):
                self.sum(stage, layer, old)
            else:
                self.chain([stage], layer, old)
        words = caption(layer, layers, index if len(self.anatomy.layers) > 1 else None)
        changed = before is not None and words != caption(*before, index if len(kinds) > 1 else None)
        if layer.stages is None:  # nobody knows how they are connected
            for key, part in layer.parts.items():
                self.y -= GAP
                self.part(part, old.get(key), enters=False)
            self.y -= LINE + 12
        else:
            self.stream(LINE + 12, arrow=False)
        self.texts.append(Text(LEFT - 26, self.y + 14, words, "caption", changed=changed))
        self.boxes.append(Box(10, self.y, OUT - 2, bottom - self.y, "frame", changed))
        for i, line in enumerate(numbers(layer.own)):
            self.texts.append(Text(NUMBERS, self.y + LINE * (i + 1), f"{line}, block", "number"))

    def chain(self, names: Sequence[str], layer: Layer, old: Mapping[str, Part], enters: bool = True) -> float:
        """Parts one after the other, or signs between them. Returns the bottom of the first."""
        first = self.y
        for i, name in enumerate(names):
            if name in layer.parts:
                bottom = self.part(layer.parts[name], old.get(name), enters or i > 0)
                first = first if i else bottom
            else:
                self.label(name, beside=True)
        return first

    def sum(self, stage: Sum, layer: Layer, old: Mapping[str, Part]) -> None:
        """Branches, one above the other, and the residual connection around them."""
        self.stream(8, arrow=False)
        split = self.y
        self.chain(stage.shared, layer, old)
        start, outs = self.y, []
        for i, branch in enumerate(stage.branches):
            if i:
                self.y -= GAP / 2
            bottom = self.chain(branch, layer, old, enters=i == 0)
            if i:
                middle = bottom - 12
                self.lines.append(Line(((CENTER, start - 4), (RAIL, start - 4), (RAIL, middle), (LEFT, middle))))
            if i < len(stage.branches) - 1:
                outs.append(self.y + 12)
        self.stream(GAP)
        plus = self.y - 7
        for out in outs:
            self.lines.append(Line(((RIGHT, out), (OUT, out), (OUT, plus), (CENTER + 7, plus))))
        if stage.skip is not None:
            self.lines.append(Line(((CENTER, split), (SKIP, split), (SKIP, plus), (CENTER - 7, plus))))
            for sign in stage.skip:
                self.texts.append(Text(SKIP + 5, (split + plus) / 2, sign, "title"))
        self.sums.append((CENTER, plus))
        self.y = plus - 7

    def heading(self, bottom: float) -> None:
        """The name and the totals, from the top of the higher of two columns."""
        before = totals(self.other.cost) if self.other else totals(self.anatomy.cost)
        lines = [Text(10, 0, line, "heading") for line in textwrap.wrap(self.anatomy.name, 44)]
        lines += [Text(10, 0, line, changed=line not in before) for line in totals(self.anatomy.cost)]
        self.y = bottom - 14
        for line in lines[::-1]:
            self.texts.append(Text(line.x, self.y, line.text, line.kind, changed=line.changed))
            self.y -= LINE + 3
        self.y -= 4


def caption(layer: Layer, layers: Sequence[int], index: int | None) -> str:
    """How often a kind of block is there: `A: 13 × Pre-norm block`; without a letter for the only kind."""
    kind = "" if index is None else f"{ascii_uppercase[index % 26]}: "
    return f"{kind}{len(layers)} {fmt.TIMES} {layer.title}"


def words(part: Part, letters: int) -> list[str]:
    """What stands in a box."""
    return [line for text in (part.title, part.settings, *part.shapes) for line in textwrap.wrap(text, letters)]


def numbers(part: Part) -> list[str]:
    """What stands beside a box."""
    found = [f"{unit(part.params, 'params')}"] if part.params else []
    found += [unit(part.active, "active")] if part.active != part.params else []
    found += [unit(part.flops, "FLOPs/token")] if part.flops else []
    state = "no state" if part.state is None else f"state {fmt.in_bytes(part.state)}" if part.state else ""
    return [*found, state] if state else found


def totals(cost: Cost) -> list[str]:
    """The costs of the whole decoder."""
    active = f", {unit(cost.params_active, 'active')}" if cost.params_active != cost.params else ""
    state = "cannot decode token by token"
    if cost.kv_bytes is not None:
        per_token = f", {fmt.in_bytes(cost.kv_bytes_per_token)} per token" if cost.kv_bytes_per_token else ""
        state = f"state {fmt.in_bytes(cost.kv_bytes)} at {cost.seq_len:,} tokens{per_token} (16 bits)"
    return [
        f"{unit(cost.params, 'params')}, {fmt.short(cost.params_non_embedding)} without embeddings{active}",
        f"{unit(cost.flops_per_token, 'FLOPs/token')} forward, mean over {cost.seq_len:,} tokens",
        state,
    ]


def unit(value: float, noun: str) -> str:
    """`2.89 M params`, but `2.89 MFLOPs/token`."""
    text = fmt.short(value)
    return f"{text}{noun}" if noun[0].isupper() and text[-1].isalpha() else f"{text} {noun}"


def picture(one: Anatomy, against: Anatomy | None = None) -> str:
    """An architecture as SVG; with another one, both side by side, that one left, with what differs marked in both."""
    pairs: list[tuple[Anatomy, Anatomy | None]] = [(against, one), (one, against)] if against else [(one, None)]
    columns = [Column(own, other) for own, other in pairs]
    for column in columns:
        column.draw()
    top = min(column.y for column in columns)
    for column in columns:
        column.heading(top)
    return template(TEMPLATE).render(
        columns=columns,
        width=WIDTH,
        top=min(column.y for column in columns),
        title=f"Architecture of {' beside '.join(own.name for own, _ in pairs)}",
        arrow_head=arrow_head,
        accent=ACCENT,
    )


def arrow_head(points: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """The corners of the arrow at the end of a line along an axis."""
    (x0, y0), (x, y) = points[-2:]
    dx, dy = (x > x0) - (x < x0), (y > y0) - (y < y0)
    yield x, y
    yield x - 6 * dx + 3 * dy, y - 6 * dy + 3 * dx
    yield x - 6 * dx - 3 * dy, y - 6 * dy - 3 * dx
