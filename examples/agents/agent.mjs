// Answers the task in AREAL_X_TASK with the official OpenAI client, which reads OPENAI_BASE_URL and OPENAI_API_KEY.
import OpenAI from "openai";

const task = JSON.parse(process.env.AREAL_X_TASK);
const answer = await new OpenAI().chat.completions.create({
  model: "policy",
  messages: [{ role: "user", content: task.prompt }],
});
process.stdout.write(answer.choices[0].message.content ?? "");
