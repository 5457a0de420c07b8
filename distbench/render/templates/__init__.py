"""What a page is made of: its template, styles and scripts."""
