"""report.html: the table, interactive curves and settings on one page that opens offline."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import plotly.graph_objects as go
import plotly.io
import yaml
from jinja2 import Environment, PackageLoader
from plotly.subplots import make_subplots

from softmax_rnn.report.curves import curves
from softmax_rnn.report.figure import TITLES
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
    figure = make_subplots(rows=1, cols=2, subplot_titles=list(TITLES.values()), shared_yaxes=True)
    for column, split in enumerate(TITLES, start=1):
        for line in curves(runs, split):
            look = style(line.variant)
            figure.add_scatter(
                x=line.tokens,
                y=line.mean,
                name=line.variant,
                legendgroup=line.variant,
                showlegend=column == 1,
                mode="lines+markers" if len(line.tokens) < 20 else "lines",
                line={"color": look.color, "dash": look.plotly_dash},
                row=1,
                col=column,
            )
    figure.update_xaxes(title_text="training tokens")
    figure.update_yaxes(type="log", title_text="nats per token", col=1)
    figure.update_layout(template="plotly_white", hovermode="x unified", height=520)
    return figure
