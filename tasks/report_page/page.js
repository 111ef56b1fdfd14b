"use strict";
const tip = document.getElementById("tip");
document.addEventListener("pointermove", (event) => {
  const text = event.target instanceof Element && event.target.getAttribute("data-tip");
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
  tip.style.transform = `translate(${Math.max(left, 8)}px, ${event.clientY + 18}px)`;
});
document.addEventListener("pointerleave", () => { tip.hidden = true; });
