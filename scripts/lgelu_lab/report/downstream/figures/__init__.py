"""One figure a measurement, each with a panel or a row per benchmark."""
