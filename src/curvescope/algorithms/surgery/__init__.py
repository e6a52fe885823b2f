"""Removal and rounding of weights with optimal updates of the others: functions of matrices."""
