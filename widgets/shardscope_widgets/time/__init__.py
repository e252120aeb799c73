"""The time view: the parts of one step, rates, prices, and the calibration button."""
