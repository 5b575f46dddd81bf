"""Rounds of speculation: their record, what they add up to, and what they tell of other settings."""

from dsv4nb.rounds.calibration import Bin, Calibration, Reliability, calibration_of
from dsv4nb.rounds.collection import Rounds
from dsv4nb.rounds.costs import Costs, leading
from dsv4nb.rounds.counterfactual import Bounds, Counterfactual, Sweep, counterfactual_of, slot_drafts, sweep
from dsv4nb.rounds.records import Draft, DraftStatus, Placed, Round, RoundKind, RoundStop, SpecUsage
from dsv4nb.rounds.temperatures import Temperatures, fit_temperatures
from dsv4nb.rounds.totals import SpecTotals

__all__ = [
    "Bin",
    "Bounds",
    "Calibration",
    "Costs",
    "Counterfactual",
    "Draft",
    "DraftStatus",
    "Placed",
    "Reliability",
    "Round",
    "RoundKind",
    "RoundStop",
    "Rounds",
    "SpecTotals",
    "SpecUsage",
    "Sweep",
    "Temperatures",
    "calibration_of",
    "counterfactual_of",
    "fit_temperatures",
    "leading",
    "slot_drafts",
    "sweep",
]
