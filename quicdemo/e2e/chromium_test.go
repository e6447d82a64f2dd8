// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"instar/internal/testutil"
)

// browser is a headless Chromium, controlled over the DevTools protocol on a
// pair of pipes: messages in JSON, each followed by a zero byte.
type browser struct {
	*running
	t       testing.TB
	to      *os.File
	session string // of the page

	mu      sync.Mutex
	last    int
	answers map[int]chan message
	// What the page's network events say.
	protocols map[string]string // of the latest response, by URL
	urls      map[string]string // by request
	sent      map[string]bool   // requests that left for the server
	failures  []string
}

type message struct {
	ID        int             `json:"id,omitempty"`
	SessionID string          `json:"sessionId,omitempty"`
	Method    string          `json:"method,omitempty"`
	Params    any             `json:"params,omitempty"`
	Result    json.RawMessage `json:"result,omitempty"`
	Error     json.RawMessage `json:"error,omitempty"`
}

// browse starts Chromium with one empty page. It may reach the server by
// HTTP/3 only, and trusts the certificate with that public key.
func (s *site) browse(spki string) *browser {
	s.t.Helper()
	chromium := testutil.NeedCommand(s.t, "chromium", "chromium")
	in, to, err := os.Pipe()
	if err != nil {
		s.t.Fatal(err)
	}
	from, out, err := os.Pipe()
	if err != nil {
		s.t.Fatal(err)
	}
	home := s.t.TempDir()
	b := &browser{t: s.t, to: to, answers: map[int]chan message{}, protocols: map[string]string{}, urls: map[string]string{}, sent: map[string]bool{}}
	// The reader ends when Chromium is gone, so this is registered before the
	// cleanup that kills it, and runs after.
	var reader sync.WaitGroup
	s.t.Cleanup(func() {
		reader.Wait()
		if err := errors.Join(to.Close(), from.Close()); err != nil {
			s.t.Error(err)
		}
	})
	b.running = s.start(options{
		env:    []string{"HOME=" + home},
		files:  []*os.File{in, out}, // descriptors 3 and 4
		stderr: func(string) {},     // it misses D-Bus and more
	}, chromium,
		"--headless", "--remote-debugging-pipe", "--user-data-dir="+home,
		"--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
		"--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
		"--disable-breakpad", "--disable-crash-reporter", "--no-zygote",
		"--origin-to-force-quic-on="+address, "--ignore-certificate-errors-spki-list="+spki,
		"about:blank")
	if err := errors.Join(in.Close(), out.Close()); err != nil {
		s.t.Fatal(err)
	}
	reader.Go(func() { b.read(from) })

	var targets struct {
		TargetInfos []struct{ TargetID, Type string }
	}
	page := ""
	testutil.WaitFor(s.t, patience, func() bool {
		b.call("Target.getTargets", nil, &targets)
		for _, target := range targets.TargetInfos {
			if target.Type == "page" {
				page = target.TargetID
			}
		}
		return page != ""
	}, "a page")
	var attached struct{ SessionID string }
	b.call("Target.attachToTarget", map[string]any{"targetId": page, "flatten": true}, &attached)
	b.session = attached.SessionID
	b.call("Network.enable", nil, nil)
	b.call("Page.enable", nil, nil)
	return b
}

// read takes answers and events until Chromium ends.
func (b *browser) read(from *os.File) {
	for input := bufio.NewReader(from); ; {
		text, err := input.ReadBytes(0)
		if err != nil {
			return
		}
		var m struct {
			message
			Params struct {
				RequestID string
				Request   struct{ URL string }
				Response  struct{ URL, Protocol string }
				ErrorText string
				Canceled  bool
			} `json:"params"`
		}
		if err := json.Unmarshal(text[:len(text)-1], &m); err != nil {
			b.t.Errorf("Chromium says %s: %v", text, err)
			return
		}
		b.mu.Lock()
		switch m.Method {
		case "":
			b.answers[m.ID] <- m.message
			delete(b.answers, m.ID)
		case "Network.requestWillBeSent":
			b.urls[m.Params.RequestID] = m.Params.Request.URL
		case "Network.requestWillBeSentExtraInfo":
			b.sent[m.Params.RequestID] = true
		case "Network.responseReceived":
			if url := m.Params.Response.URL; strings.HasPrefix(url, "https:") {
				protocol := m.Params.Response.Protocol
				b.protocols[url] = protocol
				if protocol != "h3" {
					b.failures = append(b.failures, url+": came by "+protocol)
				}
			}
		case "Network.loadingFailed":
			switch id, why := m.Params.RequestID, m.Params.ErrorText; {
			case m.Params.Canceled: // the end of a stream that the page reads
			default:
				b.failures = append(b.failures, fmt.Sprintf("%s: %s (sent: %v)", b.urls[id], why, b.sent[id]))
			}
		}
		b.mu.Unlock()
	}
}

// call calls a method and waits for its answer.
func (b *browser) call(method string, params any, result any) {
	b.t.Helper()
	answer := make(chan message, 1)
	b.mu.Lock()
	b.last++
	m := message{ID: b.last, SessionID: b.session, Method: method, Params: params}
	b.answers[m.ID] = answer
	b.mu.Unlock()
	text, err := json.Marshal(m)
	if err == nil {
		_, err = b.to.Write(append(text, 0))
	}
	if err != nil {
		b.t.Fatalf("%s: %v", method, err)
	}
	select {
	case m = <-answer:
	case <-b.ended:
		b.t.Fatalf("%s: Chromium ended", method)
	case <-time.After(patience):
		b.t.Fatalf("%s: Chromium does not answer", method)
	}
	if m.Error != nil {
		b.t.Fatalf("%s: %s", method, m.Error)
	}
	if result != nil {
		if err := json.Unmarshal(m.Result, result); err != nil {
			b.t.Fatalf("%s: %v", method, err)
		}
	}
}

// text is what an element of the page shows, empty when it is not there yet.
func (b *browser) text(id string) string {
	b.t.Helper()
	var got struct {
		Result struct{ Value any }
	}
	b.call("Runtime.evaluate", map[string]any{"expression": "document.getElementById(" + strconv.Quote(id) + ")?.textContent ?? ''", "returnByValue": true}, &got)
	return fmt.Sprint(got.Result.Value)
}

func (b *browser) number(id string) int {
	b.t.Helper()
	n, _ := strconv.Atoi(b.text(id)) // 0 before the first answer
	return n
}

// A page in headless Chromium stays live over HTTP/3 while the server replaces
// itself twice: it shows the generation that is active, its stream stays with
// the one that began it, and no request fails.
func TestBrowserAcrossUpgrades(t *testing.T) {
	testutil.NeedCommand(t, "chromium", "chromium")
	s := newSite(t, "quicdemo")
	p := s.serve(nil, "--handshake-grace", "500ms")
	b := s.browse(p.now.SPKI)
	b.call("Page.navigate", map[string]any{"url": "https://" + address + "/"}, nil)

	shows := func() {
		t.Helper()
		generation, pid := fmt.Sprint(p.now.Generation), strconv.Itoa(p.now.PID)
		testutil.WaitFor(t, patience, func() bool { return b.text("generation") == generation && b.text("pid") == pid }, "the page to show generation %s", generation)
		polls := b.number("polls")
		testutil.WaitFor(t, patience, func() bool { return b.number("polls") >= polls+4 }, "four more requests of the page")
		t.Logf("generation %s, process %s, %d requests; stream: %s", b.text("generation"), b.text("pid"), b.number("polls"), b.stream())
	}
	shows()
	streams := func(generation uint32) bool {
		return strings.Contains(b.stream(), fmt.Sprintf(" generation=%d ", generation))
	}
	testutil.WaitFor(t, patience, func() bool { return streams(p.now.Generation) }, "the stream")
	for range 2 {
		p.upgrade()
		shows()
	}
	// A stream takes ten seconds. The next one comes from the active generation.
	testutil.WaitFor(t, patience, func() bool { return streams(p.now.Generation) }, "a stream of generation %d", p.now.Generation)
	shows()

	b.mu.Lock()
	failures := b.failures
	protocols := maps.Clone(b.protocols)
	b.mu.Unlock()
	for _, failure := range failures {
		t.Errorf("Chromium lost %s", failure)
	}
	if n := b.number("failed"); n > 0 {
		t.Errorf("%d requests of the page failed", n)
	}
	if text := b.text("stream"); strings.Contains(text, "stream:") {
		t.Errorf("the stream of the page broke: %s", text)
	}
	if got := strings.Count(b.text("changes"), "→"); got != 2 {
		t.Errorf("the page saw %d changes, want 2: %s", got, b.text("changes"))
	}
	for _, path := range []string{"/", "/status", "/stream?seconds=10"} {
		if got := protocols["https://"+address+path]; got != "h3" {
			t.Errorf("%s came by %q, want h3", path, got)
		}
	}
}

// stream is the latest line of the page's stream.
func (b *browser) stream() string {
	b.t.Helper()
	lines := strings.Split(strings.TrimSpace(b.text("stream")), "\n")
	return lines[len(lines)-1]
}
