// SPDX-License-Identifier: Apache-2.0

package service

import (
	"bytes"
	"context"
	"errors"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"instar/internal/testutil"
)

func TestMain(m *testing.M) { testutil.Main(m) }

// fake tells what is asked of it.
type fake struct {
	c    *testutil.Conversation
	stop chan struct{}
	held bool // an upgrade lasts until its context ends
}

func (f *fake) Run(ctx context.Context) error {
	f.c.Send("run")
	select {
	case <-f.stop:
		if !f.held {
			return nil
		}
	case <-ctx.Done():
	}
	<-ctx.Done()
	return context.Cause(ctx)
}

func (f *fake) Upgrade(ctx context.Context) error {
	f.c.Send("upgrade")
	if f.held {
		<-ctx.Done()
	}
	return errors.New("no upgrade")
}

func (f *fake) Stop() {
	f.c.Send("stop")
	close(f.stop)
}

// process serves a fake; with an argument one that hangs.
var process = testutil.NewProgram("process", func(c *testutil.Conversation) error {
	f := &fake{c: c, stop: make(chan struct{}), held: len(c.Args) > 0}
	err := Run(context.Background(), f, func(err error) { c.Send("upgraded: %v", err) })
	c.Send("ended: %v", err)
	return nil
})

func TestSignals(t *testing.T) {
	p := process.Start(t, testutil.Options{})
	p.Expect("run")
	for _, sig := range []os.Signal{unix.SIGHUP, unix.SIGUSR2} {
		p.Signal(sig)
		p.Expect("upgrade")
		p.Expect("upgraded: no upgrade")
	}
	p.Signal(unix.SIGPIPE)
	p.Signal(unix.SIGTERM)
	p.Expect("stop")
	p.Expect("ended: <nil>")
	if code := p.Wait(); code != 0 {
		t.Errorf("exit code %d", code)
	}
}

// A server and an upgrade that hang end at the second signal.
func TestSecondStop(t *testing.T) {
	p := process.Start(t, testutil.Options{Args: []string{"hang"}})
	p.Expect("run")
	p.Signal(unix.SIGHUP)
	p.Expect("upgrade")
	p.Signal(unix.SIGINT)
	p.Expect("stop")
	p.Signal(unix.SIGINT)
	p.Expect("upgraded: no upgrade")
	p.Expect("ended: context canceled")
}

func TestLogger(t *testing.T) {
	for _, asJSON := range []bool{false, true} {
		for _, verbose := range []bool{false, true} {
			var b bytes.Buffer
			l := Logger(&b, asJSON, verbose)
			l.Debug("small")
			l.Info("large")
			if text := b.String(); strings.Contains(text, "small") != verbose || strings.HasPrefix(text, "{") != asJSON || !strings.Contains(text, "large") {
				t.Errorf("JSON %t, verbose %t: %q", asJSON, verbose, text)
			}
		}
	}
}
