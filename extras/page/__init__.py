"""report.html, pages of pictures, and files of predictions."""
