"""Figures of results. Functions take records and give a matplotlib figure; none is ever shown."""

from __future__ import annotations

import io
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tuner.plots.bandwidth import bandwidth_curves
from tuner.plots.comparison import Results, device_comparison
from tuner.plots.energy import energy_against_time
from tuner.plots.history import search_history
from tuner.plots.influence import Influence, influences, parameter_influence
from tuner.plots.ratios import ratios
from tuner.plots.utilisation import utilisation_by_context, utilisation_by_problem
from tuner.results.files import make_folder, write_atomic

__all__ = [
    "PLOTS",
    "Influence",
    "Results",
    "bandwidth_curves",
    "device_comparison",
    "energy_against_time",
    "influences",
    "parameter_influence",
    "ratios",
    "save",
    "search_history",
    "utilisation_by_context",
    "utilisation_by_problem",
]

PLOTS = {
    "utilisation": utilisation_by_problem,
    "context": utilisation_by_context,
    "history": search_history,
    "influence": parameter_influence,
}
"""Figures of one device by name: functions of (records, device)."""


def save(figure: Figure, path: Path | str, *, dots_per_inch: int = 150) -> Path:
    """Write the figure as PNG, making folders where they are missing.

    Raises:
        ResultsError: the file cannot be written.
    """
    target = Path(path)
    make_folder(target.parent)
    FigureCanvasAgg(figure)
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=dots_per_inch)
    write_atomic(target, data.getvalue())
    return target
