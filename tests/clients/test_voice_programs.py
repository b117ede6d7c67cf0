"""The text to speech of voice frameworks, with the settings they have by default."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.served import Served

TEXT = "hello world, the speech"


@pytest.mark.parametrize("form", [None, "wav", "pcm", "opus"])
def test_livekit(speaking: Served, form: str | None) -> None:
    """By default it asks for a stream of mp3 and for the voice `ash`."""
    pytest.importorskip("livekit.plugins.openai")
    import aiohttp
    from livekit.agents import utils
    from livekit.plugins import openai as plugin

    async def go() -> float:
        access = {"base_url": f"{speaking.process.url}/v1", "api_key": speaking.process.api_key}
        more: dict[str, Any] = {} if form is None else {"response_format": form}
        async with aiohttp.ClientSession() as session:
            utils.http_context._ContextVar.set(lambda: session)
            tts = plugin.TTS(model=speaking.model, **access, **more)
            async with tts.synthesize(TEXT) as stream:
                heard = [event.frame.duration async for event in stream]
            await tts.aclose()
        return sum(heard)

    assert asyncio.run(go()) > 0.05


def test_pipecat(speaking: Served) -> None:
    """It knows OpenAI's voices only, and asks for `alloy`."""
    pytest.importorskip("pipecat")
    from pipecat.frames.frames import ErrorFrame, TTSAudioRawFrame
    from pipecat.services.openai.tts import OpenAITTSService

    async def go() -> list[Any]:
        access = {"base_url": f"{speaking.process.url}/v1", "api_key": speaking.process.api_key}
        service = OpenAITTSService(
            **access, settings=OpenAITTSService.Settings(model=speaking.model, voice="alloy"), sample_rate=24000
        )
        service._sample_rate = 24000  # what its pipeline's start would set
        return [frame async for frame in service.run_tts(TEXT, "1")]

    frames = asyncio.run(go())
    assert not [frame for frame in frames if isinstance(frame, ErrorFrame)]
    assert sum(len(frame.audio) for frame in frames if isinstance(frame, TTSAudioRawFrame)) > 3840
