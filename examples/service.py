"""A service with FastAPI: the consumer starts and stops with it. docs/consumer.md says what happens when `work` fails.

KAFKA=localhost:9092 uvicorn examples.service:app --timeout-graceful-shutdown 10
"""

import asyncio
import logging
import os
import signal
import threading
from contextlib import asynccontextmanager, nullcontext

from fastapi import FastAPI, Response

from marshal_py import aio, stop_on_signals

seen: list[bytes] = []


async def work(message):
    seen.append(message.value)


async def consume(consumer):
    try:
        async for message in consumer:
            await work(message)
            message.ack()
    except Exception:
        logging.exception("the service ends")  # at once: nobody awaits this task
        await consumer.stop()  # other members take its partitions over
        signal.raise_signal(signal.SIGTERM)  # uvicorn ends, and with it the process


@asynccontextmanager
async def lifespan(app):
    async with (
        aio.connect(os.environ["KAFKA"]) as marshal,
        marshal.consumer("service", ["orders"], start="committed|earliest") as consumer,
    ):
        in_main = threading.current_thread() is threading.main_thread()  # not so under FastAPI's TestClient
        with stop_on_signals(consumer) if in_main else nullcontext():
            app.state.marshal, app.state.consumer = marshal, consumer
            task = asyncio.create_task(consume(consumer))
            yield
            await consumer.drain(5.0)  # the loop ends when what is buffered is done
            await asyncio.wait([task], timeout=5.0)
            task.cancel()  # if it hangs


app = FastAPI(lifespan=lifespan)


@app.get("/ready")
async def ready(response: Response):
    found = app.state.consumer.cached_info()
    if not app.state.consumer.healthy():
        response.status_code = 503
    return {"claims": len(found.claims), "waiting_for": found.waiting_for, "seen": len(seen)}
