# One image for every role: `agentq worker model`, `agentq keeper`, `agentq flower`, `agentq db upgrade`, ...
# It holds no agents: mount or copy their modules into /srv/agents and name them in AGENTQ_AGENTS.

FROM python:3.11-slim AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/agentq
ENV PATH=/opt/agentq/bin:$PATH
WORKDIR /src
# The dependencies alone first: a change of the code doesn't install them again.
COPY pyproject.toml .
RUN python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" \
    > requirements.txt && pip install --requirement requirements.txt
# The whole tree: agentq/tasks and agentq/config are links to the folders beside the package.
COPY . .
RUN pip install --no-deps .

FROM python:3.11-slim
# tini is process 1: it collects orphans, and passes SIGTERM on to a program that would ignore it as process 1.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --uid 10001 --user-group --home-dir /var/lib/agentq --shell /usr/sbin/nologin agentq \
    && install --directory --owner agentq --group agentq --mode 0700 /var/lib/agentq \
    && install --directory --mode 0755 /srv/agents
COPY --from=build /opt/agentq /opt/agentq
ENV PATH=/opt/agentq/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 AGENTQ_HOME=/var/lib/agentq
# A number, so that an orchestrator can see that it isn't root.
USER 10001:10001
WORKDIR /srv/agents
STOPSIGNAL SIGTERM
ENTRYPOINT ["tini", "--"]
CMD ["agentq", "--help"]
