import typer
EXAMPLE=""
def state() -> None: pass
