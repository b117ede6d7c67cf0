/** Speech of the server's, heard while it is made; and files of sound. */

import { call, events } from "./api.js";

export const RATE = 24000; // samples a second, as the server makes them
const LEAD_S = 0.08;       // of sound, at least, before a piece is heard

let audio = null;   // where all is heard: begun by a click, as browsers ask
let playing = null; // one is heard at a time

/** A text that is spoken. `samples` has all of it, piece by piece, when `run` is over. */
export class Speech {
  /** body: of the request, but for the form of its answer; changed: called when there is something new to show. */
  constructor(body, changed = () => {}) {
    Object.assign(this, { body, changed, samples: [], n: 0, first_ms: 0, made_ms: 0, finish: "", isStopped: false });
    this.controller = new AbortController();
    audio ??= new AudioContext({ sampleRate: RATE });
    audio.resume();
    this.out = new GainNode(audio);
    this.out.connect(audio.destination);
    this.end_s = 0; // the context's time at which the last piece ends
  }
  get made_s() { return this.n / RATE; }
  get heard_s() { return Math.max(0, this.made_s - Math.max(0, this.end_s - audio.currentTime)); }
  get isPaused() { return audio.state === "suspended"; }

  /** Resolves when all of it was heard, or it was stopped. Throws what went wrong. */
  async run() {
    playing?.stop();
    playing = this;
    const begun = performance.now(), timer = setInterval(this.changed, 100);
    try {
      const body = JSON.stringify({ ...this.body, response_format: "pcm", stream_format: "sse" });
      const response = await call("v1/audio/speech", { method: "POST", body, signal: this.controller.signal });
      for await (const [event] of events(response)) {
        if (event.type === "speech.audio.error") throw new Error(event.error.message);
        if (event.type === "speech.audio.done") this.finish = event.finish_reason;
        if (event.type === "speech.audio.delta") {
          this.first_ms ||= performance.now() - begun;
          this.take(samplesOf(event.audio));
        }
      }
      if (!this.finish) throw new Error("The connection broke in the middle of the speech.");
      this.made_ms = performance.now() - begun;
      while (!this.isStopped && this.heard_s < this.made_s) await new Promise(done => setTimeout(done, 40));
    } catch (error) {
      if (!this.isStopped) throw error;
      this.finish ||= "stopped";
    } finally {
      clearInterval(timer);
      this.stop();
      if (playing === this) playing = null;
      this.changed();
    }
  }
  take(samples) {
    if (!samples.length) return;
    this.samples.push(samples);
    this.n += samples.length;
    const piece = audio.createBuffer(1, samples.length, RATE);
    piece.copyToChannel(Float32Array.from(samples, sample => sample / 32768), 0);
    const source = new AudioBufferSourceNode(audio, { buffer: piece }), at_s = Math.max(this.end_s, audio.currentTime + LEAD_S);
    source.connect(this.out);
    source.start(at_s);
    this.end_s = at_s + samples.length / RATE;
  }
  togglePause() { return this.isPaused ? audio.resume() : audio.suspend(); }
  stop() {
    this.isStopped = true;
    this.controller.abort();
    this.out.disconnect();
  }
}

/** 16-bit samples of base64. */
function samplesOf(encoded) {
  const bytes = Uint8Array.from(atob(encoded), character => character.charCodeAt(0));
  return new Int16Array(bytes.buffer, 0, bytes.length >> 1);
}

/** A file of pieces of 16-bit samples. */
export function wav(pieces) {
  const n_bytes = 2 * pieces.reduce((n, piece) => n + piece.length, 0), head = new DataView(new ArrayBuffer(44));
  [..."RIFF"].forEach((character, i) => head.setUint8(i, character.charCodeAt(0)));
  head.setUint32(4, 36 + n_bytes, true);
  [..."WAVEfmt "].forEach((character, i) => head.setUint8(8 + i, character.charCodeAt(0)));
  head.setUint32(16, 16, true);
  head.setUint16(20, 1, true);
  head.setUint16(22, 1, true);
  head.setUint32(24, RATE, true);
  head.setUint32(28, 2 * RATE, true);
  head.setUint16(32, 2, true);
  head.setUint16(34, 16, true);
  [..."data"].forEach((character, i) => head.setUint8(36 + i, character.charCodeAt(0)));
  head.setUint32(40, n_bytes, true);
  return new Blob([head, ...pieces], { type: "audio/wav" });
}

/** A recording as one file that every server reads: what this browser can decode becomes a WAV. */
export async function asWav(blob) {
  const audio = new OfflineAudioContext(1, 1, RATE);
  const decoded = await audio.decodeAudioData(await blob.arrayBuffer());
  const channels = Array.from({ length: decoded.numberOfChannels }, (_, i) => decoded.getChannelData(i));
  const samples = Int16Array.from({ length: decoded.length }, (_, i) => {
    const value = channels.reduce((sum, channel) => sum + channel[i], 0) / channels.length;
    return Math.max(-32768, Math.min(32767, Math.round(value * 32768)));
  });
  return wav([samples]);
}

/** Records the microphone until `stop` of what it gives is called; that resolves to a WAV. */
export async function record() {
  if (!navigator.mediaDevices?.getUserMedia) throw new Error("This browser records on https:// and on localhost only.");
  const stream = await navigator.mediaDevices.getUserMedia({ audio: true });
  const recorder = new MediaRecorder(stream), parts = [];
  recorder.addEventListener("dataavailable", event => parts.push(event.data));
  const stopped = new Promise(done => recorder.addEventListener("stop", done));
  recorder.start();
  return {
    async stop() {
      recorder.stop();
      await stopped;
      stream.getTracks().forEach(track => track.stop());
      return asWav(new Blob(parts, { type: recorder.mimeType }));
    },
  };
}
