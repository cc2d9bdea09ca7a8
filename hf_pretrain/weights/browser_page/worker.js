// Keeps all files for a start without a network, and adds the headers that threads need to what a plain server sends.
// Other pages of this origin have caches of their own.
const PREFIX = `${self.registration.scope}#`, CACHE = PREFIX + "VERSION";
// A browser may keep files of an earlier export.
const fresh = request => new Request(request, { cache: "no-cache" });

self.addEventListener("install", event => event.waitUntil((async () => {
  await (await caches.open(CACHE)).addAll(["./", "chat.css", "chat.js", "model.json"].map(fresh));
  await self.skipWaiting();
})()));
self.addEventListener("activate", event => event.waitUntil((async () => {
  for (const name of await caches.keys()) if (name.startsWith(PREFIX) && name !== CACHE) await caches.delete(name);
  await self.clients.claim();
})()));

const withHeaders = response => {
  const headers = new Headers(response.headers);
  headers.set("Cross-Origin-Opener-Policy", "same-origin");
  headers.set("Cross-Origin-Embedder-Policy", "require-corp");
  return new Response(response.body, { status: response.status, statusText: response.statusText, headers });
};

self.addEventListener("fetch", event => {
  const { request } = event;
  if (request.method !== "GET" || new URL(request.url).origin !== location.origin) return;
  event.respondWith((async () => {
    const cache = await caches.open(CACHE);
    const kept = await cache.match(request);
    if (kept) return withHeaders(kept);
    const response = await fetch(request.mode === "navigate" ? request : fresh(request));
    if (response.status === 200) event.waitUntil(cache.put(request, response.clone()));
    return withHeaders(response);
  })());
});
