"""Widgets: panels, still figures and the prediction box. Each chapter's panels live in a module of their own.

A chapter writes ``kv.predict(...)``, ``kv.reveal(...)`` and shows panels made by
``kvcourse.widgets.<chapter>``.
"""

from kvcourse.widgets.panel import Panel, Still
from kvcourse.widgets.prediction import Prediction, predict, reveal

__all__ = ["Panel", "Prediction", "Still", "predict", "reveal"]
