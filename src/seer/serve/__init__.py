# SPDX-License-Identifier: Apache-2.0
"""`seer serve`: rollouts over HTTP, with the endpoints that RL frameworks and OpenAI's clients call.

    backend      the model that is served: a `Rollout` and its session
    gate         who may start now: limits, pauses, weight updates, draining
    generation   the responses of one HTTP request, from submission to its end
    completions, chat, token_generate, sglang    one file per family of endpoints: its fields, and its replies
    lifecycle_endpoints, weight_endpoints        the administrative ones
    watch, live                                  metrics, and the page
    app          the routes, keys and errors around all of them
    server       uvicorn, signals and the ready line

Invariants
  1. Every request that was accepted ends once: with an answer, with an error, or by its client's leaving.
  2. Nothing grows with the number of requests that have ended, and what waits is bounded by the gate.
  3. A response has tokens of one weights version.
"""
