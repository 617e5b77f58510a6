"""Figures: plain data in, plotly ``Figure`` out. No widget, no model and no clock in here.

``template`` holds the colors and the one plotly template; each chapter has a module of its own with the pure
functions behind its pictures (``figures/chapter_01.py`` for chapter 01).
"""
