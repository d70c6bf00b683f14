import typer
EXAMPLE=""
def doctor() -> None: pass
