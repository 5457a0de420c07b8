"""Run files: format, header, launches, baselines, frames, and other tools' formats."""
