"""The picture of one architecture, or of two side by side, as SVG: geometry here, looks in the template."""

import textwrap
from collections.abc import Iterator, Sequence
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
IN_BOX, IN_HEADING = 37, 44  # letters that fit


Place = tuple[int, str]
"""What something is a picture of, to find it in another one: the index of a kind of layers, else -1, and a name."""


@dataclass
class Text:
    """A line of text that starts, or is centred, at a point on its base line. place: None if it is never marked."""

    x: float
    y: float
    text: str
    kind: str = "detail"  # or title, number, caption, heading
    place: Place | None = None
    anchor: str = "start"
    changed: bool = False  # whether the other architecture has no such text in this place


@dataclass
class Box:
    """A rectangle. kind: of its part, or frame. place: of the words in it."""

    x: float
    y: float
    width: float
    height: float
    kind: str
    place: Place
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
    y: float = 0
    boxes: list[Box] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    texts: list[Text] = field(default_factory=list)
    sums: list[tuple[float, float]] = field(default_factory=list)

    def draw(self) -> None:
        """The parts, from the tokens up to the logits."""
        one, sizes = self.anatomy, self.anatomy.sizes
        source = " of the source and the text" if one.n_encoder else ""
        self.label(f"tokens{source}, up to {sizes['context']:,}")
        self.part(one.embedding, (-1, "embedding"))
        self.beside(f"T {fmt.TIMES} {sizes['dim']:,}", "dim")
        if one.segments:
            self.aside(one.segments, "segments", added=True)
        if one.position:
            self.aside(one.position, "position", one.added)
        if one.input_norm:
            self.part(one.input_norm, (-1, "input norm"))
        for i, (layer, numbers) in enumerate(one.layers):
            if i and i == one.n_encoder:
                self.end_of_encoder(one.encoder_norm)
            self.layer(layer, numbers, i)
        if one.order:
            self.beside(f"layers in the order {one.order}", "order")
        if one.norm:
            self.part(one.norm, (-1, "norm"))
        if one.head_transform:
            self.part(one.head_transform, (-1, "transform"))
        self.part(one.head, (-1, "head"))
        self.stream(GAP)
        self.label(f"logits, T {fmt.TIMES} {sizes['vocabulary']:,}")

    def end_of_encoder(self, norm: Part | None) -> None:
        """The last norm of an encoder; above it, the stream of the decoder begins."""
        if norm:
            self.part(norm, (-1, "encoder norm"))
        self.stream(GAP)
        self.label("the source, to every cross-attention")
        self.y -= GAP
        self.label("the text, embedded as the source is")

    def label(self, words: str) -> None:
        """Words on the stream."""
        self.texts.append(Text(CENTER, self.y - 4, words, place=(-1, "label"), anchor="middle"))
        self.y -= LINE + 4

    def beside(self, words: str, name: str = "") -> None:
        """Words beside the stream; without a name, never marked."""
        self.texts.append(Text(CENTER + 8, self.y - 7, words, place=(-1, name) if name else None))
        self.stream(LINE + 6, arrow=False)

    def stream(self, length: float, arrow: bool = True) -> None:
        """The stream, up to what comes next."""
        self.lines.append(Line(((CENTER, self.y), (CENTER, self.y - length)), arrow))
        self.y -= length

    def part(self, part: Part, place: Place, enters: bool = True) -> float:
        """A box on the stream, with its numbers. Returns its bottom. enters: whether the stream does."""
        if enters:
            self.stream(GAP)
        bottom = self.y
        self.box(part, place, LEFT, RIGHT - LEFT, IN_BOX)
        return bottom

    def box(self, part: Part, place: Place, x: float, width: float, letters: int) -> None:
        """A box that stands at the present height."""
        title, *others = (textwrap.wrap(text, letters) for text in (part.title, part.settings, *part.shapes))
        inside = [(line, "title") for line in title] + [(line, "detail") for lines in others for line in lines]
        beside = [(line, "number") for line in numbers(part)]
        height = LINE * (max(len(inside), len(beside)) if len(inside) > 1 else 1) + 9
        self.y -= height
        self.boxes.append(Box(x, self.y, width, height, part.kind, place))
        sides = (inside, x + width / 2, place, "middle"), (beside, NUMBERS, (place[0], f"of {place[1]}"), "start")
        for lines, at, of, anchor in sides:
            first = self.y + (height - LINE * len(lines)) / 2 + 10
            self.texts += [Text(at, first + LINE * i, *line, of, anchor) for i, line in enumerate(lines)]

    def aside(self, part: Part, name: str, added: bool) -> None:
        """A part beside the stream, such as the position encoding: added to it, or handed to the mixers."""
        x, bottom = CENTER + 22, self.y
        self.y -= 2
        start = self.y
        self.box(part, (-1, name), x, RIGHT - x, 15)
        top, middle = self.y, (start + self.y) / 2
        if added:
            self.lines += [Line(((x, middle), (CENTER + 7, middle))), Line(((CENTER, bottom), (CENTER, middle + 7)))]
            self.sums.append((CENTER, middle))
            self.lines.append(Line(((CENTER, middle - 7), (CENTER, top)), arrow=False))
        else:
            self.lines.append(Line((((x + RIGHT) / 2, top), ((x + RIGHT) / 2, top - GAP)), dashed=True))
            self.lines.append(Line(((CENTER, bottom), (CENTER, top)), arrow=False))

    def layer(self, layer: Layer, layers: Sequence[int], index: int) -> None:
        """A kind of block in its frame. layers: their numbers."""
        self.stream(GAP)
        bottom = self.y
        for stage in layer.stages or ():
            if isinstance(stage, Sum):
                self.sum(stage, layer, index)
            else:
                self.chain([stage], layer, index)
        if layer.stages is None:  # nobody knows how they are connected
            for key, part in layer.parts.items():
                self.y -= GAP
                self.part(part, (index, key), enters=False)
            self.y -= LINE + 12
        else:
            self.stream(LINE + 12, arrow=False)
        kind = f"{ascii_uppercase[index % 26]}: " if len(self.anatomy.layers) > 1 else ""
        tower = ", encoder" if index < self.anatomy.n_encoder else ""
        words = f"{kind}{len(layers)} {fmt.TIMES} {layer.title}{tower}"
        self.texts.append(Text(LEFT - 26, self.y + 14, words, "caption", (index, "caption")))
        self.boxes.append(Box(10, self.y, OUT - 2, bottom - self.y, "frame", (index, "caption")))
        for i, line in enumerate(numbers(layer.own)):
            self.texts.append(Text(NUMBERS, self.y + LINE * (i + 1), f"{line}, block", "number"))

    def chain(self, names: Sequence[str], layer: Layer, index: int, enters: bool = True) -> float:
        """Parts one after the other, or signs between them. Returns the bottom of the first."""
        first = self.y
        for i, name in enumerate(names):
            if name in layer.parts:
                bottom = self.part(layer.parts[name], (index, name), enters or i > 0)
                first = first if i else bottom
            else:
                self.beside(name)
        return first

    def sum(self, stage: Sum, layer: Layer, index: int) -> None:
        """Branches, one above the other, and the residual connection around them."""
        self.stream(8, arrow=False)
        split = self.y
        self.chain(stage.shared, layer, index)
        start, outs = self.y, []
        for i, branch in enumerate(stage.branches):
            if i:
                self.y -= GAP / 2
            bottom = self.chain(branch, layer, index, enters=i == 0)
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
        lines = [Text(10, 0, line, "heading") for line in textwrap.wrap(self.anatomy.name, IN_HEADING)]
        lines += [Text(10, 0, line, place=(-1, "totals")) for line in totals(self.anatomy.cost)]
        self.y = bottom - 14
        for line in lines[::-1]:
            line.y = self.y
            self.y -= LINE + 3
        self.texts += lines[::-1]
        self.y -= 4

    def mark(self, other: "Column") -> None:
        """Mark the texts that another column does not have in the same place, and the boxes with such texts."""
        theirs, last = {(text.place, text.text) for text in other.texts}, len(other.anatomy.layers) - 1
        for text in self.texts:
            if text.place:
                text.changed = ((min(text.place[0], last), text.place[1]), text.text) not in theirs
        changed = {text.place for text in self.texts if text.changed}
        for box in self.boxes:
            box.changed = box.place in changed


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
    columns = [Column(anatomy) for anatomy in (against, one) if anatomy]
    for column in columns:
        column.draw()
    top = min(column.y for column in columns)
    for column in columns:
        column.heading(top)
    for column, other in zip(columns, columns[::-1], strict=True):  # a single one has nothing that it lacks itself
        column.mark(other)
    return template(TEMPLATE).render(
        columns=columns,
        width=WIDTH,
        top=min(column.y for column in columns),
        title=f"Architecture of {' beside '.join(column.anatomy.name for column in columns)}",
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
