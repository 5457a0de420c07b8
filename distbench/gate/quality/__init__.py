"""The gate's rates of false alarms and of slowdowns found, on launches of unchanged code."""
