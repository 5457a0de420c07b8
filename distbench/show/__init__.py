"""How anything is shown: blocks to text, Markdown and HTML; units; plot style; what CI systems read."""
