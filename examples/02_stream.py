"""Stream a chat answer token by token, two conversations at once, from an event loop."""

import asyncio
import sys

from camshaft import LLM, SamplingParams


async def tell(llm: LLM, question: str) -> str:
    prompt = llm.apply_chat_template([{"role": "user", "content": question}])
    pieces = []
    async for output in llm.generate_async(prompt, SamplingParams(max_tokens=24)):
        pieces.append(output.outputs[0].text_diff)
        print(f"[{question}] {pieces[-1]!r}")
    return "".join(pieces)


async def main() -> None:
    with LLM(sys.argv[1] if len(sys.argv) > 1 else None) as llm:
        for answer in await asyncio.gather(tell(llm, "Name a colour."), tell(llm, "Name a fruit.")):
            print(answer)


asyncio.run(main())
