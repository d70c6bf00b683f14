# The library and the command `marshal`, without Spark. No engine has built this file yet: the project's CI has none.
#
#   docker build --tag marshal .
#   docker run --rm marshal marshal consume --group billing orders --bootstrap-servers HOST:9092
#
# For a program of yours: FROM marshal, COPY it, and CMD ["python", "app.py"].

FROM python:3.13-slim AS build
COPY . /source
RUN python -m venv /opt/marshal && /opt/marshal/bin/pip install --no-cache-dir "/source[cli,metrics]"

FROM python:3.13-slim
COPY --from=build /opt/marshal /opt/marshal
ENV PATH=/opt/marshal/bin:$PATH PYTHONUNBUFFERED=1
USER 10001:10001
# Process 1: it passes SIGTERM on, reaps orphans, and ends the sessions of a consumer that is killed.
ENTRYPOINT ["marshal", "run", "--"]
CMD ["marshal", "--help"]
