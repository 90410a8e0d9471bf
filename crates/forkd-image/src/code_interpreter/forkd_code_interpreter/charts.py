"""The data behind a matplotlib figure, as clients draw it again."""

import math
import re

# With more points than this the figure has no chart: the picture says it all.
MAX_POINTS = 100_000
UNIT = re.compile(r"^(.*?)\s*[(\[]([^()\[\]]+)[)\]]\s*$")
SCALES = {"linear", "log", "symlog", "logit", "function", "functionlog", "asinh"}


class TooLarge(Exception):
    pass


def watch_boxes():
    """Notes the statistics of box plots when they are drawn: afterwards only lines are left of them."""
    from matplotlib.axes import Axes

    draw = Axes.bxp
    if getattr(draw, "is_watched", False):
        return

    def bxp(self, bxpstats, *args, **kwargs):
        drawn = draw(self, bxpstats, *args, **kwargs)
        self.forkd_boxes = [*getattr(self, "forkd_boxes", []), *bxpstats]
        return drawn

    bxp.is_watched = True
    bxp.__doc__ = draw.__doc__
    bxp.__name__ = draw.__name__
    Axes.bxp = bxp


def of_figure(figure):
    """The chart of a figure; None without axes, or with too many points."""
    try:
        charts = [of_axes(axes) for axes in figure.axes if is_plot(axes)]
    except TooLarge:
        return None
    if not charts:
        return None
    title = figure._suptitle.get_text() if getattr(figure, "_suptitle", None) else ""
    if len(charts) == 1:
        charts[0]["title"] = charts[0]["title"] or title or None
        return charts[0]
    return {"type": "superchart", "title": title or None, "elements": charts}


def is_plot(axes):
    # A colour bar explains another one's colours.
    return axes.get_label() != "<colorbar>" and axes.get_visible()


def of_axes(axes):
    for read in (pie, boxes, bars, points):
        chart = read(axes)
        if chart:
            return chart
    return {"type": "unknown", "title": axes.get_title() or None, "elements": []}


def base(kind, axes):
    x_label, y_label = axes.get_xlabel() or None, axes.get_ylabel() or None
    return {
        "type": kind,
        "title": axes.get_title() or None,
        "x_label": x_label,
        "y_label": y_label,
        "x_unit": unit(x_label),
        "y_unit": unit(y_label),
    }


def unit(label):
    found = UNIT.match(label or "")
    return found[2] if found else None


def pie(axes):
    from matplotlib.patches import Wedge

    wedges = [patch for patch in axes.patches if isinstance(patch, Wedge)]
    if not wedges:
        return None
    elements = [
        {"label": text_of(wedge), "angle": number(abs(wedge.theta2 - wedge.theta1)), "radius": number(wedge.r)}
        for wedge in wedges
    ]
    return {"type": "pie", "title": axes.get_title() or None, "elements": elements}


def boxes(axes):
    found = getattr(axes, "forkd_boxes", None)
    if not found:
        return None
    names = [label.get_text() for label in axes.get_xticklabels()]
    elements = []
    for index, box in enumerate(found):
        name = box.get("label") or (names[index] if index < len(names) else "") or str(index + 1)
        elements.append(
            {
                "label": str(name),
                "min": number(box["whislo"]),
                "first_quartile": number(box["q1"]),
                "median": number(box["med"]),
                "third_quartile": number(box["q3"]),
                "max": number(box["whishi"]),
                "outliers": [number(value) for value in limited(box.get("fliers", ()))],
            }
        )
    return {**base("box_and_whisker", axes), "elements": elements}


def bars(axes):
    from matplotlib.container import BarContainer

    groups = [container for container in axes.containers if isinstance(container, BarContainer)]
    if not groups:
        return None
    elements = []
    for group in groups:
        horizontal = getattr(group, "orientation", None) == "horizontal"
        axis = axes.yaxis if horizontal else axes.xaxis
        names = tick_names(axis)
        label = group.get_label()
        label = "" if label.startswith("_") else label
        for bar in limited(group.patches):
            start, size = (bar.get_y(), bar.get_height()) if horizontal else (bar.get_x(), bar.get_width())
            value = bar.get_width() if horizontal else bar.get_height()
            elements.append({"label": bar_label(axis, names, start, size), "group": label, "value": number(value)})
    return {**base("bar", axes), "elements": elements}


def bar_label(axis, names, start, size):
    """The text of the tick under a bar, or the bar's position."""
    middle = start + size / 2
    within = [(abs(place - middle), name) for place, name in names if start <= place <= start + size and name]
    if within and is_categorical(axis):
        return min(within)[1]
    # Ticks that user code put there are names; those that matplotlib chose are numbers.
    from matplotlib.ticker import FixedFormatter, FuncFormatter

    if within and isinstance(axis.get_major_formatter(), (FixedFormatter, FuncFormatter)):
        return min(within)[1]
    return str(value_on(axis, middle))


def points(axes):
    from matplotlib.collections import PathCollection

    lines = [line for line in axes.lines if line.get_transform().contains_branch(axes.transData)]
    # A line across all of the axes, such as that of axhline, is no data.
    lines = [line for line in lines if line.get_transform() == axes.transData]
    clouds = [item for item in axes.collections if isinstance(item, PathCollection)]
    elements = []
    for line in lines:
        elements.append(series(axes, line, zip(*line.get_data(orig=False))))
    for cloud in clouds:
        elements.append(series(axes, cloud, cloud.get_offsets()))
    if not elements:
        return None
    drawn = any(line.get_linestyle() not in ("None", "none", "", " ") for line in lines)
    return {
        **base("line" if drawn and not clouds else "scatter", axes),
        **ticks("x", axes.xaxis, axes.get_xscale()),
        **ticks("y", axes.yaxis, axes.get_yscale()),
        "elements": elements,
    }


def series(axes, artist, pairs):
    label = artist.get_label()
    values = [[value_on(axes.xaxis, x), value_on(axes.yaxis, y)] for x, y in limited(pairs)]
    return {"label": "" if str(label).startswith("_") else str(label), "points": values}


def ticks(name, axis, scale):
    low, high = sorted(axis.get_view_interval())
    places = [(place, text) for place, text in tick_names(axis) if low <= place <= high]
    if is_categorical(axis):
        scale = "categorical"
    elif is_dates(axis):
        scale = "datetime"
    elif scale not in SCALES:
        scale = "unknown"
    return {
        f"{name}_ticks": [value_on(axis, place) for place, _ in places],
        f"{name}_tick_labels": [text for _, text in places],
        f"{name}_scale": scale,
    }


def tick_names(axis):
    places = [float(place) for place in limited(axis.get_majorticklocs())]
    return list(zip(places, axis.get_major_formatter().format_ticks(places)))


def converter(axis):
    return type(axis.get_converter() if hasattr(axis, "get_converter") else axis.converter).__name__


def is_categorical(axis):
    return converter(axis) == "StrCategoryConverter"


def is_dates(axis):
    return "Date" in converter(axis) or "Date" in type(axis.get_major_formatter()).__name__


def value_on(axis, value):
    """A value of an axis: a category's name, a date, or a number."""
    if is_categorical(axis):
        units = getattr(axis, "units", None)
        for name, place in getattr(units, "_mapping", {}).items():
            if place == value:
                return str(name)
    elif is_dates(axis) and "Period" not in converter(axis):
        from matplotlib.dates import num2date

        return num2date(float(value)).replace(tzinfo=None).isoformat()
    return number(value)


def number(value):
    """A number as JSON has it."""
    value = float(value)
    return value if math.isfinite(value) else None


def text_of(artist):
    label = str(artist.get_label())
    return "" if label.startswith("_") else label


def limited(values):
    values = list(values)
    if len(values) > MAX_POINTS:
        raise TooLarge
    return values
