"""A service with FastAPI that calls a slow service, fifty calls at once, in the order of each key: docs/process.md.

KAFKA=localhost:9092 GATEWAY=http://localhost:8000 uvicorn examples.calls:app
"""

import os
from contextlib import asynccontextmanager

import httpx2
from fastapi import FastAPI, Response

from marshal_py import Reject, Retry, aio


@asynccontextmanager
async def lifespan(app):
    async with (
        httpx2.AsyncClient(base_url=os.environ["GATEWAY"]) as gateway,
        aio.connect(os.environ["KAFKA"]) as marshal,
        marshal.consumer("billing", ["orders"], start="committed|earliest") as consumer,
    ):

        async def charge(message):
            headers = {"Idempotency-Key": message.idempotency_key}
            answer = await gateway.post("/charges", content=message.value, headers=headers)
            if answer.status_code == 422:
                raise Reject(answer.text)
            if answer.status_code == 429:
                raise Retry(after_s=float(answer.headers.get("Retry-After", 1)))
            answer.raise_for_status()

        async with consumer.process(charge, workers=50, timeout_s=10) as work:
            app.state.work = work
            yield  # until SIGTERM
            await work.drain(8)  # finish what has come, then give the partitions to the others


app = FastAPI(lifespan=lifespan)


@app.get("/ready")
async def ready(response: Response):
    work = app.state.work
    response.status_code = 503 if work.closed else 200
    stats = work.stats()
    return {"working": stats.working, "waiting": stats.waiting_for, "oldest_s": stats.oldest_s}
