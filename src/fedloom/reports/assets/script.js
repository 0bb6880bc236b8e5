"use strict";
(() => {
  const all = (what, from = document) => Array.from(from.querySelectorAll(what));
  const tip = document.getElementById("tip");
  const show = (text, event) => {
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const x = event.clientX + 14 + box.width > innerWidth ? event.clientX - box.width - 14 : event.clientX + 14;
    const y = event.clientY + 14 + box.height > innerHeight ? event.clientY - box.height - 14 : event.clientY + 14;
    tip.style.left = `${Math.max(4, x)}px`;
    tip.style.top = `${Math.max(4, y)}px`;
  };
  const hide = () => { tip.hidden = true; };

  // Light and dark.
  const root = document.documentElement;
  document.getElementById("theme").addEventListener("click", () => {
    const now = root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
    root.dataset.theme = now === "dark" ? "light" : "dark";
  });

  // Methods are hidden and shown in all pictures at once.
  const hidden = new Set();
  all("[data-toggle]").forEach((button) => button.addEventListener("click", () => {
    const key = button.dataset.toggle;
    const off = button.getAttribute("aria-pressed") === "true";
    button.setAttribute("aria-pressed", String(!off));
    if (off) hidden.add(key); else hidden.delete(key);
    all(`[data-s="${key}"]`).forEach((group) => group.classList.toggle("off", off));
  }));

  // Marks that say what they are; a client is marked wherever it is drawn.
  const mark = (client) => {
    all(".here").forEach((x) => x.classList.remove("here"));
    if (client !== null) all("[data-client]").filter((x) => x.dataset.client === client).forEach((x) => x.classList.add("here"));
  };
  document.addEventListener("mousemove", (event) => {
    const at = event.target.closest ? event.target.closest("[data-tip]") : null;
    if (at) { show(at.dataset.tip, event); mark(at.dataset.client ?? null); }
    else if (!(event.target.closest && event.target.closest("svg.curves"))) { hide(); mark(null); }
  });

  // Curves: the values at the round one points at.
  const round = (v) => Math.abs(v) >= 1000 ? v.toLocaleString("en", { maximumFractionDigits: 0 }) : String(Number(v.toPrecision(4)));
  all("svg.curves").forEach((svg) => {
    const chart = JSON.parse(svg.dataset.chart);
    const [low, high, start, end] = chart.x;
    const cross = document.createElementNS("http://www.w3.org/2000/svg", "line");
    cross.setAttribute("class", "cross");
    cross.setAttribute("y1", chart.y[3]);
    cross.setAttribute("y2", chart.y[2]);
    const xs = [...new Set(chart.lines.flatMap((l) => l.x))].sort((a, b) => a - b);
    svg.addEventListener("mousemove", (event) => {
      const at = svg.createSVGPoint();
      at.x = event.clientX; at.y = event.clientY;
      const here = at.matrixTransform(svg.getScreenCTM().inverse());
      if (here.x < start - 10 || here.x > end + 10 || !xs.length) { cross.remove(); hide(); return; }
      const wanted = low + (here.x - start) / (end - start) * (high - low);
      const x = xs.reduce((a, b) => Math.abs(b - wanted) < Math.abs(a - wanted) ? b : a);
      const place = start + (high > low ? (x - low) / (high - low) : 0.5) * (end - start);
      cross.setAttribute("x1", place); cross.setAttribute("x2", place);
      svg.append(cross);
      const values = [];
      for (const line of chart.lines) {
        if (line.s !== null && hidden.has(String(line.s))) continue;
        const k = line.x.indexOf(x);
        if (k >= 0) values.push([line.y[k], `${line.n}: ${round(line.y[k])}${line.l ? ` (${round(line.l[k])} to ${round(line.h[k])})` : ""}`]);
      }
      values.sort((a, b) => b[0] - a[0]);
      show([`${chart.title} ${round(x)}`, ...values.map((v) => v[1])].join("\n"), event);
    });
    svg.addEventListener("mouseleave", () => { cross.remove(); hide(); });
  });

  // Tables: sorting.
  const value = (row, i) => {
    const text = row.cells[i].dataset.v;
    const number = Number(text);
    return text === "" ? null : Number.isNaN(number) ? text : number;
  };
  const compare = (a, b) => typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
  all("table.sortable").forEach((table) => {
    const heads = all("thead th", table);
    heads.forEach((head, i) => head.querySelector("button").addEventListener("click", () => {
      const order = head.getAttribute("aria-sort") === "descending" ? "ascending" : head.getAttribute("aria-sort") === "ascending" || i > 0 ? "descending" : "ascending";
      heads.forEach((h) => h.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", order);
      const sign = order === "ascending" ? 1 : -1;
      const rows = all("tbody tr", table).map((row) => [value(row, i), row]);
      rows.sort(([a], [b]) => a === null ? (b === null ? 0 : 1) : b === null ? -1 : sign * compare(a, b));
      table.tBodies[0].append(...rows.map((r) => r[1]));
    }));
  });

  // Tables: filtering.
  const filter = document.getElementById("client-filter");
  if (filter) {
    const rows = all("table.clients tbody tr");
    filter.addEventListener("input", () => {
      const wanted = filter.value.trim().toLowerCase();
      let count = 0;
      for (const row of rows) {
        row.hidden = !row.cells[0].textContent.toLowerCase().includes(wanted);
        count += !row.hidden;
      }
      document.getElementById("client-count").textContent = `${count.toLocaleString("en")} client${count === 1 ? "" : "s"}`;
    });
  }
  document.body.dataset.ready = "yes";
})();
