"""report.html: the table, interactive curves and settings on one page that opens offline."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd
import plotly.graph_objects as go
import plotly.io
import yaml
from jinja2 import Environment, PackageLoader
from plotly.subplots import make_subplots

from softmax_rnn.report.curves import curves
from softmax_rnn.report.figure import TITLES, log_limits
from softmax_rnn.report.style import style
from softmax_rnn.report.table import cells, label
from softmax_rnn.training.folder import RunFolder


def page(runs: Sequence[RunFolder], table: pd.DataFrame) -> str:
    """The whole page; everything that a configuration could say is escaped."""
    environment = Environment(
        loader=PackageLoader("softmax_rnn.report", "."), autoescape=True, trim_blocks=True
    )
    header, *rows = cells(table)
    return environment.get_template("report.html.jinja").render(
        header=header,
        rows=rows,
        plot=plotly.io.to_html(
            _plot(runs), full_html=False, include_plotlyjs=True, config={"responsive": True}
        ),
        runs=[
            {
                "name": f"{label(run)}, seed {run.config.seed}",
                "config": yaml.safe_dump(run.config.to_dict(), sort_keys=False),
                "environment": yaml.safe_dump(run.environment, sort_keys=False),
            }
            for run in runs
        ],
    )


def _plot(runs: Sequence[RunFolder]) -> go.Figure:
    figure = make_subplots(
        rows=len(TITLES),
        cols=1,
        subplot_titles=list(TITLES.values()),
        shared_xaxes=True,
        vertical_spacing=0.08,
    )
    drawn = {split: curves(runs, split) for split in TITLES}
    for row, lines in enumerate(drawn.values(), start=1):
        for line in lines:
            look = style(line.variant)
            figure.add_scatter(
                x=line.tokens,
                y=line.mean,
                name=line.variant,
                legendgroup=line.variant,
                showlegend=row == 1,
                mode="lines+markers" if len(line.tokens) < 20 else "lines",
                line={"color": look.color, "dash": look.plotly_dash},
                row=row,
                col=1,
            )
    limits = log_limits([line for lines in drawn.values() for line in lines])
    figure.update_yaxes(
        type="log", range=[math.log10(limit) for limit in limits], title_text="nats per token"
    )
    figure.update_xaxes(title_text="training tokens", row=len(TITLES))
    figure.update_layout(
        template="plotly_white",
        hovermode="x unified",
        height=820,
        margin={"l": 60, "r": 20, "t": 40, "b": 120},
        legend={"orientation": "h", "y": -0.08, "yanchor": "top"},
    )
    return figure
