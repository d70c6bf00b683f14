import typer
app=typer.Typer()
@app.command()
def tail() -> None: pass
