// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"bytes"
	_ "embed"
	"encoding/json"
	"fmt"
	"html/template"
	"io"
	"strings"
)

//go:embed page.html
var pageSource string

var pageTemplate = template.Must(template.New("page").Parse(pageSource))

// page is what the template shows.
type page struct {
	Verdict  string
	Good     bool
	Summary  string
	Tiles    []tile
	Compare  bool
	Columns  []string
	Rows     []row
	Sections []section
	Footer   string
	Data     pageData
}

type tile struct {
	Name, Value string
	Bad         bool
}

type section struct {
	Title, How, Outcome string
	Good                bool
	Problems            []string
}

// pageData is what the page's script draws from.
type pageData struct {
	Step float64   `json:"step"`
	Runs []pageRun `json:"runs"`
}

type pageRun struct {
	Result
	Timeline []Sample `json:"timeline"`
}

// WritePage writes the report as one self-contained HTML page.
func WritePage(w io.Writer, r *Report) error {
	first := &r.Runs[0]
	p := page{
		Verdict: verdict(first),
		Good:    first.OK(),
		Summary: fmt.Sprintf("A QUIC server was replaced %s by a new process, under load: %s requests on %s connections, each download checked byte by byte.",
			times(first.Upgrades), group(first.Requests), group(first.Connections)),
		Tiles:   tiles(first),
		Compare: len(r.Runs) > 1,
		Footer: fmt.Sprintf("%s, Linux %s, %s, %d CPUs, seed %d. Load: %d persistent connections, %g new ones a second, %d workers a process.",
			r.Started.Format("2 January 2006 15:04:05 -07:00"), r.Host.Kernel, r.Host.Arch, r.Host.CPUs,
			r.Options.Seed, r.Options.Connections, r.Options.Rate, r.Options.Workers),
		Data: pageData{Step: step.Seconds()},
	}
	p.Columns, p.Rows = compare(r)
	for i := range r.Runs {
		run := &r.Runs[i]
		p.Sections = append(p.Sections, section{
			Title: string(run.Method), How: how(run.Method), Outcome: outcome(run), Good: run.OK(), Problems: run.Problems,
		})
		if run.Timeline == nil {
			run.Timeline = []Sample{}
		}
		p.Data.Runs = append(p.Data.Runs, pageRun{Result: *run, Timeline: run.Timeline})
	}
	var buf bytes.Buffer
	if err := pageTemplate.Execute(&buf, &p); err != nil {
		return fmt.Errorf("render page: %w", err)
	}
	if _, err := w.Write(buf.Bytes()); err != nil {
		return fmt.Errorf("write page: %w", err)
	}
	return nil
}

// MarshalJSON rounds the time to milliseconds: a page has hundreds of samples.
func (s Sample) MarshalJSON() ([]byte, error) {
	type plain Sample
	p := plain(s)
	p.T = float64(int64(s.T*1000+0.5)) / 1000
	return json.Marshal(p)
}

func verdict(r *Result) string {
	switch {
	case r.OK():
		return "Nothing lost"
	case r.Lost() > 0:
		return group(r.Lost()) + " lost"
	case r.Requests == 0:
		return "No request was served"
	default:
		return "Servers failed"
	}
}

func how(m Method) string {
	switch m {
	case MethodRestart:
		return "stop the server, then start the next one"
	case MethodReuseport:
		return "start the next one on the same port with SO_REUSEPORT, then stop the old one gracefully"
	default:
		return "flip new flows to the next one, let the old one drain"
	}
}

// outcome is the run in one sentence.
func outcome(r *Result) string {
	parts := []string{plural(int64(r.Upgrades), "upgrade"), plural(r.Requests, "request")}
	for _, c := range []struct {
		n    int64
		what string
	}{
		{r.FailedRequests, "failed request"}, {r.FailedHandshakes, "failed handshake"},
		{r.BrokenConnections, "broken connection"}, {r.FailedMigrations, "failed migration"},
	} {
		if c.n > 0 {
			parts = append(parts, plural(c.n, c.what))
		}
	}
	if r.Lost() == 0 {
		parts = append(parts, "nothing lost")
	}
	return strings.Join(parts, ", ") + "."
}

func tiles(r *Result) []tile {
	list := []tile{
		{Name: "Upgrades under load", Value: fmt.Sprint(r.Upgrades)},
		{Name: "Requests", Value: group(r.Requests)},
		{Name: "Failed requests", Value: group(r.FailedRequests), Bad: r.FailedRequests > 0},
		{Name: "Failed handshakes", Value: group(r.FailedHandshakes), Bad: r.FailedHandshakes > 0},
		{Name: "Broken connections", Value: group(r.BrokenConnections), Bad: r.BrokenConnections > 0},
		{Name: "Connections", Value: group(r.Connections)},
		{Name: "Client moved to a new port", Value: group(r.Migrations + r.Rebinds)},
		{Name: "Resumed with 0-RTT", Value: group(r.ZeroRTT.Accepted)},
		{Name: "Downloaded and checked", Value: size(r.Bytes)},
	}
	return append(list, tile{Name: "Request, 99th percentile", Value: milliseconds(r.Request.P99)})
}
