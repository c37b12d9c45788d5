"""Figures: they show what the records say, every text is legible, and none is ever shown."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.text import Text

from tests.made_records import (
    BASELINE,
    decode,
    gpu,
    made_calibration,
    made_full_calibration,
    made_record,
    made_run,
    software,
    twelve_problems,
)
from tuner import plots
from tuner.device_info import DeviceInfo
from tuner.kernels import families
from tuner.kernels.base import Family
from tuner.plots import style
from tuner.problems import NormRopeProblem
from tuner.records import Record

RUN = made_run(twelve_problems(), trials=25)
SOFTWARE_RUN = made_run([decode(1, 4096), decode(4, 512)], device=software(), trials=15)
FAST: dict[str, int | str] = {**BASELINE, "strategy": "packed_f16"}
NEAR_THE_CEILING = [
    made_record(decode(1, 131072), dict(BASELINE), median_us=2000),
    made_record(decode(1, 131072), FAST, median_us=61.5),
    made_record(decode(64, 16384), FAST, median_us=420.0),
    made_record(decode(64, 16384, lengths="lognormal:1024"), FAST, state="timeout"),
]
CONTEXTS_NEAR_EACH_OTHER = [
    made_record(decode(sequences, context), median_us=sequences * context / 1000)
    for sequences in (1, 8, 64)
    for context in (4096, 4944, 5200, 16384, 131072)
]
ONCE_EACH = [
    made_record(problem, {**BASELINE, "strategy": strategy}, median_us=100.0)
    for problem in (decode(1, 1024), decode(4, 512))
    for strategy in ("baseline", "scalar_f32", "packed_f16", "int_dot", "matrix")
]
EDGES: dict[str, Sequence[Record]] = {
    "all strategies on two": ONCE_EACH,
    "contexts near each other": CONTEXTS_NEAR_EACH_OTHER,
    "many": RUN,
    "near the ceiling": NEAR_THE_CEILING,
    "one": [made_record()],
    "none correct": [made_record(state="compile")],
    "empty contexts": [made_record(decode(n, 0)) for n in (1, 8)],
    "from nothing on": [made_record(decode(1, context)) for context in (0, 1, 2, 4096)],
    "measured again": [made_record(), made_record(median_us=104.0, note="final")],
    "not calibrated": [made_record(read_gb_s=None)],
    "none": [],
}


def baseline_of(_: str) -> dict[str, int | str]:
    return dict(BASELINE)


def draw(figure: Figure) -> list[Text]:
    """Draw the figure; its visible texts that are not empty."""
    FigureCanvasAgg(figure).draw()
    texts = figure.findobj(Text)
    return [t for t in texts if isinstance(t, Text) and t.get_visible() and t.get_text().strip()]


def words(figure: Figure) -> list[str]:
    return [text.get_text() for text in draw(figure)]


def header(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.texts]


def assert_legible(figure: Figure) -> None:
    """No text leaves the figure, and no two texts overlap."""
    texts = draw(figure)
    hidden = {id(text) for axes in figure.axes for text in _ticks_out_of_sight(axes)}
    boxes = [(text, text.get_window_extent()) for text in texts if id(text) not in hidden]
    page = figure.bbox
    for text, box in boxes:
        assert page.x0 <= box.x0, text
        assert box.x1 <= page.x1, text
        assert page.y0 <= box.y0, text
        assert box.y1 <= page.y1, text
    for (one, first), (two, second) in itertools.combinations(boxes, 2):
        across = min(first.x1, second.x1) - max(first.x0, second.x0)
        along = min(first.y1, second.y1) - max(first.y0, second.y0)
        # Boxes hold a little air around the letters, those of slanted neighbours a lot of it.
        slanted = one.get_rotation() % 90 and one.get_rotation() == two.get_rotation()
        assert slanted or across <= 1 or along <= 2, f"{one!r} overlaps {two!r}"


def _ticks_out_of_sight(axes: Axes) -> Iterator[Text]:
    """Labels of ticks outside the limits, which matplotlib makes but does not draw."""
    for axis, limits in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        for tick in axis.get_major_ticks():
            if not min(limits) <= tick.get_loc() <= max(limits):
                yield tick.label1


@pytest.mark.parametrize("name", plots.PLOTS)
@pytest.mark.parametrize("edge", EDGES)
def test_every_text_of_a_figure_is_legible(name: str, edge: str) -> None:
    assert_legible(plots.PLOTS[name](EDGES[edge], gpu(), baseline_of=baseline_of))


def test_every_text_of_a_comparison_is_legible() -> None:
    longer = msgspec.structs.replace(gpu(), name="AMD Radeon RX 7900 XTX (RADV NAVI31)")
    other = made_run(twelve_problems()[:6], device=longer, trials=5)
    everything = [
        plots.Results(RUN, gpu()),
        plots.Results(other, longer),
        plots.Results(SOFTWARE_RUN, software()),
    ]
    for count in range(4):
        assert_legible(plots.device_comparison(everything[:count], baseline_of=baseline_of))


def test_the_check_for_overlap_notices_overlap() -> None:
    figure = Figure()
    figure.text(0.5, 0.5, "one text")
    figure.text(0.51, 0.5, "another text")
    with pytest.raises(AssertionError, match="overlaps"):
        assert_legible(figure)


@pytest.mark.parametrize("name", plots.PLOTS)
def test_the_header_names_device_driver_date_and_number(name: str) -> None:
    figure = plots.PLOTS[name](RUN, gpu(), baseline_of=baseline_of)
    subtitle = f"NVIDIA H200 · NVIDIA 580.159.04 · 2026-11-29 · n = {len(RUN)} trials"
    assert subtitle in header(figure)
    assert style.SOFTWARE_NOTE not in header(figure)


@pytest.mark.parametrize("name", plots.PLOTS)
def test_a_software_driver_is_said_to_prove_function_only(name: str) -> None:
    figure = plots.PLOTS[name](SOFTWARE_RUN, software(), baseline_of=baseline_of)
    assert style.SOFTWARE_NOTE in header(figure)


def test_trials_with_an_older_driver_are_left_out_and_counted() -> None:
    old = msgspec.structs.replace(gpu(), driver_info="570.0")
    made = [
        made_record(device=old, time="2026-01-01T00:00:00Z", median_us=1.0),
        made_record(median_us=100.0),
    ]
    shown = words(plots.utilisation_by_problem(made, gpu(), baseline_of=baseline_of))
    assert any("580.159.04" in w and "(1 with other drivers left out)" in w for w in shown)
    assert any("100 µs" in w for w in shown)
    assert not any("1.00 µs" in w for w in shown)


def test_bars_have_the_lengths_of_the_utilisations() -> None:
    problem = decode(8, 16384)
    made = [
        made_record(problem, dict(BASELINE), median_us=1000.0),
        made_record(problem, FAST, median_us=100.0),
        made_record(problem, {**FAST, "subgroups": 2}, median_us=300.0),
    ]
    figure = plots.utilisation_by_problem(made, gpu(), baseline_of=baseline_of)
    (axes,) = figure.axes
    lengths = [bar.get_width() for bar in axes.patches]
    assert lengths == pytest.approx([100 * (r.utilisation or 0) for r in made[:2]])
    shown = words(figure)
    assert "60.2 %   100 µs   10.0x" in shown
    assert "6.0 %   1.00 ms" in shown
    assert "read bandwidth measured in the same run, 4,600 GB/s" in shown


def test_a_problem_without_a_correct_variant_says_so() -> None:
    figure = plots.utilisation_by_problem(NEAR_THE_CEILING, gpu(), baseline_of=baseline_of)
    assert "no correct variant" in words(figure)


def test_the_context_axis_is_binary_and_lines_are_the_best_of_a_strategy() -> None:
    made = [
        made_record(decode(1, 4096), FAST, median_us=20.0),
        made_record(decode(1, 4096), {**FAST, "subgroups": 2}, median_us=10.0),
        made_record(decode(1, 16384), FAST, median_us=50.0),
        made_record(decode(1, 16384), {**FAST, "strategy": "int_dot"}, median_us=60.0),
    ]
    figure = plots.utilisation_by_context(made, gpu(), baseline_of=baseline_of)
    (axes,) = figure.axes
    assert axes.get_xscale() == "log"
    drawn = {tuple(line.get_xdata()): tuple(line.get_ydata()) for line in axes.lines}
    assert drawn[4096, 16384] == pytest.approx(
        (100 * (made[1].utilisation or 0), 100 * (made[2].utilisation or 0))
    )
    assert {"4k", "16k", "h32/8 d128, 1 sequence", "int_dot", "packed_f16"} <= set(words(figure))


def test_a_family_without_strategies_has_a_baseline_all_the_same() -> None:
    plain, tuned = ({"schedule": name} for name in ("serial", "beside"))
    made = [made_record(decode(1, 4096), each, family="qsa_chain") for each in (plain, tuned)]
    figure = plots.utilisation_by_context(made, gpu(), baseline_of=lambda _: plain)
    (legend,) = figure.legends
    assert {text.get_text() for text in legend.get_texts()} > {"baseline", "qsa_chain"}


def test_a_strategy_looks_alike_whichever_others_are_shown() -> None:
    names = ("baseline", "scalar_f32", "packed_f16", "int_dot", "matrix", "a new one")
    made = [made_record(decode(1, 4096), {**BASELINE, "strategy": name}) for name in names]
    alone = [_looks_in(made[place : place + 1]) for place in range(len(names))]
    assert _looks_in(made) == {name: look for each in alone for name, look in each.items()}
    assert len(set(_looks_in(made).values())) == len(names)


def _looks_in(records: Sequence[Record]) -> dict[str, tuple[object, object]]:
    figure = plots.utilisation_by_context(records, gpu(), baseline_of=baseline_of)
    lines = figure.legends[0].get_lines()
    return {
        str(line.get_label()): (line.get_color(), line.get_marker())
        for line in lines
        if line.get_marker() != "None"
    }


@pytest.mark.parametrize("family", families(), ids=lambda family: family.name)
def test_strategies_of_a_family_are_known_and_differ_in_colour_and_marker(family: Family) -> None:
    declared = [p.values for p in family.parameters if p.name == "strategy"] or [(family.name,)]
    tuned = {str(name) for name in declared[0]} - {"baseline"}
    assert tuned <= set(style.STRATEGIES)
    looks = style.looks(tuned).values()
    for key in ("color", "marker"):
        assert len({look[key] for look in looks}) == len(tuned)


def test_all_known_strategies_can_be_told_apart() -> None:
    looks = style.looks(["baseline", *style.STRATEGIES])
    assert len({tuple(look.items()) for look in looks.values()}) == 1 + len(style.STRATEGIES)
    assert {look["color"] for look in looks.values()} == {style.GREY, *style.PALETTE}


@pytest.mark.parametrize("contexts", [(0,), (0, 4096), (0, 1, 16), (1, 16), (4096, 16384)])
def test_every_point_is_inside_the_context_axis_in_its_order(contexts: tuple[int, ...]) -> None:
    made = [made_record(decode(1, context), FAST) for context in contexts]
    (axes,) = plots.utilisation_by_context(made, gpu(), baseline_of=baseline_of).axes
    places = [float(axes.transData.transform((x, 0))[0]) for x in contexts]
    assert places == sorted(set(places))
    left, right = axes.get_xlim()
    assert left < contexts[0] <= contexts[-1] < right
    assert style.tokens_text(contexts[0]) in [text.get_text() for text in axes.get_xticklabels()]


def test_panels_of_the_context_figure_tell_geometries_apart() -> None:
    """Also those of the same ratio of query to KV heads."""
    problems = [decode(1, 4096), decode(1, 4096, gqa=8), decode(1, 4096, kv_heads=16, gqa=8)]
    made = [made_record(problem, FAST) for problem in problems]
    figure = plots.utilisation_by_context(made, gpu(), baseline_of=baseline_of)
    heads = [axes.get_title("left").partition(" ")[0] for axes in figure.axes]
    assert heads == ["h32/8", "h64/8", "h64/16"]


def test_panels_of_the_context_figure_stand_in_the_order_of_their_problems() -> None:
    """Whichever have the longest lines."""
    shape = [(64, 4096), (1, 4096), (8, 4096), (8, 8192)]
    made = [made_record(decode(*each), FAST) for each in shape]
    figure = plots.utilisation_by_context(made, gpu(), baseline_of=baseline_of)
    assert [axes.get_title("left") for axes in figure.axes] == [
        "h32/8 d128, 1 sequence",
        "h32/8 d128, 8 sequences",
        "h32/8 d128, 64 sequences",
    ]


def test_panels_say_what_their_axis_counts() -> None:
    heads = {"query_heads": 24, "kv_heads": 2, "head_size": 256, "rotary": 64}
    rows = [
        msgspec.structs.replace(made_record(), problem=NormRopeProblem(rows=n, **heads))
        for n in (1, 64)
    ]
    made = [made_record(decode(1, 4096), FAST), *rows]
    figure = plots.utilisation_by_context(made, gpu(), baseline_of=baseline_of)
    assert [axes.get_xlabel() for axes in figure.axes] == ["rows", "longest context, tokens"]
    # Of more than are shown, those with contexts and several strategies.
    many = [made_record(decode(n, 4096), FAST) for n in range(1, 9)]
    many += [made_record(decode(9, 4096), {**FAST, "strategy": name}) for name in ("a", "b")]
    many.insert(0, made_record(decode(1, 4096, gqa=1), FAST))
    shown = plots.utilisation_by_context([*rows, *many], gpu(), baseline_of=baseline_of).axes
    assert {axes.get_xlabel() for axes in shown} == {"longest context, tokens", ""}
    assert "h32/8 d128, 9 sequences" in [axes.get_title("left").split("\n")[0] for axes in shown]


def test_the_history_is_a_staircase_of_the_best_so_far() -> None:
    times = [100.0, 50.0, 70.0, 20.0, 90.0]
    made = [
        made_record(values={"n": n}, median_us=time, time=f"2026-11-29T12:00:0{n}Z")
        for n, time in enumerate(times)
    ]
    made.insert(2, made_record(values={"n": 9}, state="timeout"))
    (axes,) = plots.search_history(made, gpu(), baseline_of=lambda _: None).axes
    dots, stairs, failed = axes.lines
    assert list(dots.get_xdata()) == [1, 2, 4, 5, 6]
    assert list(dots.get_ydata()) == pytest.approx(times)
    assert list(stairs.get_xdata()) == [1, 2, 2, 5, 5, 6]
    assert list(stairs.get_ydata()) == pytest.approx([100, 100, 50, 50, 20, 20])
    assert list(failed.get_xdata()) == [3]


def test_the_history_leaves_the_final_measurement_out() -> None:
    made = [made_record(median_us=10.0), made_record(median_us=12.0, note="final")]
    (axes,) = plots.search_history(made, gpu(), baseline_of=lambda _: None).axes
    assert list(axes.lines[0].get_ydata()) == pytest.approx([10.0])


def test_the_history_tells_what_the_best_was_measured_again_at() -> None:
    twice = [made_record(median_us=10.0), made_record(median_us=12.0, note="final")]
    assert "10.0 µs, measured again 12.0 µs" in words(plots.search_history(twice, gpu()))
    assert "10.0 µs" in words(plots.search_history(twice[:1], gpu()))


@pytest.mark.parametrize(
    ("median_us", "again_us", "unit", "told"),
    [
        (950.0, 1020.0, "µs", "950 µs, measured again 1,020 µs"),
        (1040.0, 980.0, "ms", "1.04 ms, measured again 0.98 ms"),
    ],
)
def test_all_times_of_a_panel_are_in_one_unit(
    median_us: float, again_us: float, unit: str, told: str
) -> None:
    slow = made_record(values={"n": 1}, median_us=3000.0)
    best = {"values": {"n": 2}, "time": "2026-11-29T12:00:09Z"}
    made = [slow, made_record(median_us=median_us, **best)]
    made.append(made_record(median_us=again_us, note="final", **best))
    figure = plots.search_history(made, gpu(), baseline_of=lambda _: None)
    (axes,) = figure.axes
    assert axes.get_ylabel() == f"time, {unit}"
    assert told in words(figure)
    shown = [3.0, median_us / 1000] if unit == "ms" else [3000.0, median_us]
    assert list(axes.lines[0].get_ydata()) == pytest.approx(shown)


def test_what_is_told_of_a_single_trial_stays_inside_its_panel() -> None:
    once = [made_record(median_us=142_000.0), made_record(median_us=106_000.0, note="final")]
    figure = plots.search_history([*once, *RUN], gpu())
    FigureCanvasAgg(figure).draw()
    for axes in figure.axes:
        (told,) = axes.texts
        assert axes.bbox.x0 <= told.get_window_extent().x0, told.get_text()


def test_the_history_shows_six_problems_and_says_of_how_many() -> None:
    figure = plots.search_history(RUN, gpu(), baseline_of=baseline_of)
    assert len(figure.axes) == 6
    assert "6 of 12 problems shown, those with the most trials" in header(figure)


def test_influence_is_the_slowdown_of_the_best_with_a_value() -> None:
    made = [made_record(values=dict(BASELINE), median_us=5000.0)]
    for a, b, time in ((1, 1, 100.0), (1, 2, 120.0), (2, 1, 200.0), (2, 2, 240.0)):
        values: dict[str, int | str] = {**FAST, "subgroups": a, "tokens_unrolled": b}
        made.append(made_record(values=values, median_us=time))
    strongest, weaker = plots.influences(made, baseline_of=baseline_of)
    assert (strongest.parameter, weaker.parameter) == ("subgroups", "tokens_unrolled")
    assert strongest.slowdowns == {1: (1.0,), 2: (pytest.approx(2.0),)}
    assert weaker.slowdowns == {1: (1.0,), 2: (pytest.approx(1.2),)}
    # Times are products, so their logarithms are sums: what one leaves over, the other explains.
    left = math.log(1.2) ** 2 / (math.log(2.0) ** 2 + math.log(1.2) ** 2)
    assert strongest.explained == pytest.approx(1 - left * 3 / 2)
    assert weaker.explained == 0.0


def test_as_many_values_as_trials_explain_nothing() -> None:
    """Each value of its own would explain everything, whatever the times are."""
    values = [(n, 1 + n % 2) for n in range(4)]
    made = [
        made_record(values={**FAST, "subgroups": a, "tokens_unrolled": b}, median_us=100.0 + 9 * a)
        for a, b in values
    ]
    known, unknown = plots.influences(made, baseline_of=baseline_of)
    assert (known.parameter, known.explained) == ("tokens_unrolled", 0.0)
    assert (unknown.parameter, unknown.explained) == ("subgroups", None)
    figure = plots.parameter_influence(made, gpu(), baseline_of=baseline_of)
    assert "subgroups: too few trials to tell" in words(figure)


def test_a_variant_that_was_timed_twice_is_one_trial() -> None:
    made = [made_record(median_us=10.0), made_record(median_us=12.0, note="final")]
    _, subtitle = header(plots.utilisation_by_problem(made, gpu(), baseline_of=baseline_of))
    assert subtitle.endswith("n = 1 trial")


@pytest.mark.parametrize(
    ("read_gb_s", "text"),
    [((1.19, 1.19), "1.19"), ((1.2, 4.0), "1.2 to 4"), ((4583.2, 4664.9), "4,583 to 4,665")],
)
def test_the_ceiling_is_named_with_three_digits(read_gb_s: tuple[float, float], text: str) -> None:
    made = [
        made_record(decode(n, 4096), read_gb_s=each) for n, each in enumerate(read_gb_s, start=1)
    ]
    shown = words(plots.utilisation_by_problem(made, gpu(), baseline_of=baseline_of))
    assert f"read bandwidth measured in the same run, {text} GB/s" in shown


def test_influence_pools_problems_by_dots() -> None:
    made = [
        made_record(decode(s, 4096), {**FAST, "subgroups": n}, median_us=10.0 * s * n)
        for s in (1, 8)
        for n in (1, 2)
    ]
    (influence,) = plots.influences(made, baseline_of=baseline_of)
    assert influence.slowdowns[2] == pytest.approx((2.0, 2.0))


def test_a_comparison_shows_what_only_one_device_was_tuned_for() -> None:
    figure = plots.device_comparison(
        [plots.Results(RUN, gpu()), plots.Results(SOFTWARE_RUN, software())],
        baseline_of=baseline_of,
    )
    shown = words(figure)
    assert shown.count("not tuned") == 11 + 1
    assert len(figure.axes[0].patches) == 12 + 2
    assert style.SOFTWARE_NOTE in shown


@pytest.mark.parametrize(
    ("nanoseconds", "text"),
    [
        (3.14159, "3.14 ns"),
        (25_000.0, "25.0 µs"),
        (99_960.0, "100 µs"),
        (999_600.0, "1.00 ms"),
        (1.906e6, "1.91 ms"),
        (2.5e9, "2.50 s"),
        (0.9999e9, "1.00 s"),
    ],
)
def test_times_have_three_digits_and_a_unit(nanoseconds: float, text: str) -> None:
    assert style.time_text(nanoseconds) == text


@pytest.mark.parametrize(
    ("tokens", "text"), [(512, "512"), (4096, "4k"), (5000, "5,000"), (131072, "128k")]
)
def test_token_counts_are_written_as_people_say_them(tokens: int, text: str) -> None:
    assert style.tokens_text(tokens) == text


def test_a_saved_figure_is_a_picture(tmp_path: Path) -> None:
    figure = plots.utilisation_by_problem(RUN, gpu(), baseline_of=baseline_of)
    path = plots.save(figure, tmp_path / "new" / "picture.png", dots_per_inch=50)
    height, width, _ = imread(path).shape
    assert (width, height) == (450, pytest.approx(figure.get_figheight() * 50, abs=1))
    assert [p.name for p in path.parent.iterdir()] == ["picture.png"]


def test_plots_need_no_display_and_no_pyplot() -> None:
    code = "import sys, tuner.plots; print('matplotlib.pyplot' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent.parent,
        check=True,
    )
    assert done.stdout.strip() == "False"


# --- bandwidth -----------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [gpu(), software()], ids=["gpu", "software"])
def test_bandwidth_curves_have_every_point_and_the_ceiling(device: DeviceInfo) -> None:
    calibration = made_full_calibration(device)
    figure = plots.bandwidth_curves(calibration, device)
    assert_legible(figure)
    axes = figure.axes[0]
    for curve, line in zip(calibration.curves, axes.lines, strict=False):
        assert list(zip(*line.get_data(), strict=True)) == [*curve.points]
    assert axes.lines[-1].get_ydata() == [calibration.read_gb_s] * 2
    said = " ".join(words(figure))
    assert f"nothing cached: {calibration.read_gb_s:,.4g} GB/s" in said
    assert "2026-11-29" in said
    assert (style.SOFTWARE_NOTE in header(figure)) == device.is_cpu


def test_without_curves_the_picture_says_what_to_do() -> None:
    figure = plots.bandwidth_curves(made_calibration(), gpu())
    assert_legible(figure)
    assert "no curves yet: run `tuner calibrate`" in words(figure)
