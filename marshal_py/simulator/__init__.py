"""Tools that fold, generate and judge logs without a broker; nothing here runs in production."""
