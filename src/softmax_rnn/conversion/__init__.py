"""Pretrained models of transformers with another attention: conversion, training, report."""

# First: that package imports parts of this one, which need its own.
import softmax_rnn.models  # noqa: F401
