"""Numbers as people read them."""


def number(value: float, digits: int = 4) -> str:
    """`11,340`, `95.92`, `0.876`: significant digits, and never an exponent for large ones."""
    return f"{value:,.{digits}g}" if value < 10**digits - 0.5 else f"{value:,.0f}"
