"""Other tools' formats: what they can read of ours, and what we read of nccl-tests."""
