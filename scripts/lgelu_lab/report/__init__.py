"""Records → tables, figures and a page. No torch: a report is made where the records are."""
