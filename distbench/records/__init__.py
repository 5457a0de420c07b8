"""Run files, and everything that can be read of them: format, header, launches, baselines, other tools' formats."""
