// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// row is the metric's line in docs/metrics.md.
func (m *metric) row() string {
	kind := "gauge"
	if m.counter {
		kind = "counter"
	}
	labels := make([]string, len(m.labels))
	for i, l := range m.labels {
		labels[i] = "`" + l + "`"
	}
	return fmt.Sprintf("| `%s` | %s | %s | %s | %s |", m.name, kind, m.unit, strings.Join(labels, ", "), m.help)
}

// TestDocument compares docs/metrics.md with the catalog, both ways: metrics, types,
// units, labels and meanings.
func TestDocument(t *testing.T) {
	text, err := os.ReadFile("../docs/metrics.md")
	if os.IsNotExist(err) && testing.Short() {
		t.Skip("a virtual machine has no documents")
	}
	if err != nil {
		t.Fatal(err)
	}
	metrics, labels, alerts := map[string]bool{}, map[string]bool{}, 0
	names := map[string]bool{}
	for _, m := range catalog {
		names[m.name] = true
	}
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSuffix(line, "\n")
		if regexp.MustCompile("^\\| `instar_\\w+` \\| (gauge|counter) ").MatchString(line) {
			metrics[line] = true
			continue
		}
		for _, n := range nameInQuery.FindAllString(line, -1) {
			if alerts++; !names[n] {
				t.Errorf("docs/metrics.md speaks of %s, which does not exist", n)
			}
		}
		if m := regexp.MustCompile("^\\| `(\\w+)` \\|").FindStringSubmatch(line); m != nil {
			labels[m[1]] = true
		}
	}
	for _, m := range catalog {
		if row := m.row(); !metrics[row] {
			t.Errorf("docs/metrics.md lacks\n%s", row)
		} else {
			delete(metrics, row)
		}
		for _, l := range m.labels {
			if _, known := labels[l]; !known {
				t.Errorf("docs/metrics.md does not explain the label %s", l)
			}
			labels[l] = false
		}
	}
	if alerts < 10 {
		t.Errorf("found %d metrics in the examples", alerts)
	}
	for row := range metrics {
		t.Errorf("docs/metrics.md has a metric that is not in the catalog:\n%s", row)
	}
	for l, unused := range labels {
		if unused {
			t.Errorf("docs/metrics.md explains the label %s, which no metric has", l)
		}
	}
}

// panel is what the test reads of a dashboard.
type panel struct {
	ID      int    `json:"id"`
	Type    string `json:"type"`
	Title   string `json:"title"`
	Targets []struct {
		Expr         string `json:"expr"`
		LegendFormat string `json:"legendFormat"`
		RefID        string `json:"refId"`
	} `json:"targets"`
	Panels  []panel `json:"panels"`
	GridPos struct {
		X int `json:"x"`
		Y int `json:"y"`
		W int `json:"w"`
		H int `json:"h"`
	} `json:"gridPos"`
}

type dashboard struct {
	Panels     []panel `json:"panels"`
	Templating struct {
		List []struct {
			Name  string          `json:"name"`
			Type  string          `json:"type"`
			Query json.RawMessage `json:"query"`
		} `json:"list"`
	} `json:"templating"`
}

var (
	nameInQuery  = regexp.MustCompile(`\binstar_\w+`)
	matchers     = regexp.MustCompile(`\{([^}]*)\}`)
	labelMatcher = regexp.MustCompile(`(\w+)\s*(?:=~|!~|!=|=)`)
	grouping     = regexp.MustCompile(`\b(?:by|on|without|ignoring|group_left|group_right)\s*\(([^)]*)\)`)
	legend       = regexp.MustCompile(`\{\{\s*(\w+)\s*\}\}`)
	variable     = regexp.MustCompile(`\$\{?(\w+)`)
	rate         = regexp.MustCompile(`\b(?:rate|irate|increase)\(\s*(instar_\w+)`)
)

// TestDashboard checks that the queries of the dashboard use metrics and labels that
// exist, counters with a rate and gauges without one.
func TestDashboard(t *testing.T) {
	text, err := os.ReadFile("../examples/grafana/instar.json")
	if os.IsNotExist(err) && testing.Short() {
		t.Skip("a virtual machine has no examples")
	}
	if err != nil {
		t.Fatal(err)
	}
	var d dashboard
	if err := json.Unmarshal(text, &d); err != nil {
		t.Fatal(err)
	}
	variables := map[string]bool{"__rate_interval": true, "__range": true}
	byName := map[string]*metric{}
	labels := map[string]bool{"job": true, "instance": true} // of the scrape
	for _, m := range catalog {
		byName[m.name] = m
		for _, l := range m.labels {
			labels[l] = true
		}
	}
	used, queries := map[string]bool{}, 0
	check := func(where, query string) {
		queries++
		names := nameInQuery.FindAllString(query, -1)
		if len(names) == 0 {
			t.Errorf("%s: no metric in %q", where, query)
		}
		rated := []string{}
		for _, m := range rate.FindAllStringSubmatch(query, -1) {
			rated = append(rated, m[1])
		}
		for _, n := range names {
			m, ok := byName[n]
			if !ok {
				t.Errorf("%s: %s does not exist", where, n)
				continue
			}
			used[n] = true
			if m.counter != slices.Contains(rated, n) {
				t.Errorf("%s: %s is a counter: %v, and has a rate: %v", where, n, m.counter, !m.counter)
			}
		}
		var asked []string
		for _, m := range matchers.FindAllStringSubmatch(query, -1) {
			for _, l := range labelMatcher.FindAllStringSubmatch(m[1], -1) {
				asked = append(asked, l[1])
			}
		}
		for _, m := range grouping.FindAllStringSubmatch(query, -1) {
			for l := range strings.SplitSeq(m[1], ",") {
				asked = append(asked, strings.TrimSpace(l))
			}
		}
		for _, l := range asked {
			if l != "" && !labels[l] {
				t.Errorf("%s: no metric has the label %q", where, l)
			}
		}
		for _, v := range variable.FindAllStringSubmatch(query, -1) {
			if !variables[v[1]] {
				t.Errorf("%s: the variable %s is not defined", where, v[1])
			}
		}
	}
	for _, v := range d.Templating.List {
		if v.Type == "query" {
			check("variable "+v.Name, string(v.Query))
		}
		variables[v.Name] = true
	}
	ids := map[int]bool{}
	var walk func([]panel)
	walk = func(panels []panel) {
		for i, p := range panels {
			if ids[p.ID] {
				t.Errorf("panel %q: the id %d is taken", p.Title, p.ID)
			}
			ids[p.ID] = true
			if len(p.Targets) == 0 && p.Type != "row" && p.Type != "text" {
				t.Errorf("panel %q asks for nothing", p.Title)
			}
			for _, q := range panels[:i] {
				a, b := p.GridPos, q.GridPos
				if a.X < b.X+b.W && b.X < a.X+a.W && a.Y < b.Y+b.H && b.Y < a.Y+a.H {
					t.Errorf("panels %q and %q overlap", p.Title, q.Title)
				}
			}
			for _, target := range p.Targets {
				where := fmt.Sprintf("panel %q, query %s", p.Title, target.RefID)
				check(where, target.Expr)
				for _, l := range legend.FindAllStringSubmatch(target.LegendFormat, -1) {
					if !labels[l[1]] {
						t.Errorf("%s: no metric has the label %q of its legend", where, l[1])
					}
				}
			}
			walk(p.Panels)
		}
	}
	walk(d.Panels)
	if queries < 10 || len(used) < len(catalog)/2 {
		t.Errorf("%d queries, which use %d of %d metrics", queries, len(used), len(catalog))
	}
}
