// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"instar/internal/testutil"
)

// The test binary is a sandbox, or a process in it, when this is its first argument.
const (
	sandboxArg = "test-sandbox"
	processArg = "test-process"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 2 {
		switch os.Args[1] {
		case sandboxArg:
			os.Exit(runSandbox(os.Args[2]))
		case processArg:
			fmt.Println("here")
			fmt.Fprintln(os.Stderr, "last words")
			if os.Args[2] == "stay" {
				time.Sleep(time.Hour)
			}
			os.Exit(7)
		}
	}
	testutil.Main(m)
}

var self = [2]string{"/proc/self/exe", "test"}

// runSandbox is a sandbox that does what the test asks for.
func runSandbox(do string) int {
	pipe, err := Enter("net")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	s := NewSender(pipe)
	switch do {
	case "crash":
		panic("a fault")
	case "fail":
		s.Send(FailureOf(&EnvironmentError{"no such device"}))
		return 1
	case "listen":
		if err := LoopbackUp(); err != nil {
			s.Send(FailureOf(err))
			return 1
		}
		l, err := net.Listen("tcp", "127.0.0.1:80") // in use elsewhere, or not
		if err == nil {
			err = l.Close()
		}
		if err != nil {
			s.Send(FailureOf(err))
			return 1
		}
	case "wait":
		ctx, stop := signal.NotifyContext(context.Background(), unix.SIGTERM)
		defer stop()
		starter := NewStarter()
		p, err := starter.Start(self, []string{processArg, "stay"}, nil, func([]byte) {})
		if err != nil {
			s.Send(FailureOf(err))
			return 1
		}
		s.Send(Failure{Text: fmt.Sprint(p.PID)})
		<-ctx.Done() // and ends without a word to its process
	}
	return 0
}

func run(ctx context.Context, do string, each func(Failure)) error {
	return Run(ctx, Command{Self: self, Args: []string{sandboxArg, do}, Purpose: "it is a test"}, func(r io.Reader) error {
		var last *Failure
		err := Receive(r, func(f Failure) {
			last = &f
			if each != nil {
				each(f)
			}
		})
		return errors.Join(last.Err(), err)
	})
}

func TestRun(t *testing.T) {
	testutil.NeedRoot(t)
	if err := run(t.Context(), "listen", nil); err != nil {
		t.Error(err)
	}
	err := run(t.Context(), "fail", nil)
	if environment, ok := errors.AsType[*EnvironmentError](err); !ok || environment.Text != "no such device" {
		t.Errorf("fail: %v", err)
	}
	if err := run(t.Context(), "crash", nil); err == nil || !strings.Contains(err.Error(), "exit status 2") {
		t.Errorf("crash: %v", err)
	}
	missing := Command{Self: [2]string{"/no/such/file", "x"}}
	if err := Run(t.Context(), missing, func(io.Reader) error { return nil }); err == nil {
		t.Error("a file that is not there is no error")
	}
}

// When the context ends the sandbox does, and with it what it has started.
func TestInterrupted(t *testing.T) {
	testutil.NeedRoot(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	pid := 0
	err := run(ctx, "wait", func(f Failure) {
		if _, err := fmt.Sscan(f.Text, &pid); err != nil {
			t.Error(f.Text)
		}
		cancel()
	})
	if !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if pid > 0 {
		testutil.WaitFor(t, 10*time.Second, func() bool { return unix.Kill(pid, 0) == unix.ESRCH }, "the end of process %d", pid)
	}
}

// Nobody enters a sandbox by hand.
func TestEnter(t *testing.T) {
	if f, err := Enter("net"); err == nil {
		t.Errorf("entered: %v", f.Name())
	}
}

func TestCheck(t *testing.T) {
	err := Check("it is a test")
	if os.Geteuid() == 0 {
		testutil.NeedRoot(t)
		if err != nil {
			t.Error(err)
		}
		return
	}
	if _, ok := errors.AsType[*EnvironmentError](err); !ok || !strings.Contains(err.Error(), "root: it is a test;") {
		t.Error(err)
	}
}

func TestProcess(t *testing.T) {
	s := NewStarter()
	defer s.Stop()
	var lines []string
	p, err := s.Start(self, []string{processArg, "end"}, nil, func(line []byte) { lines = append(lines, string(line)) })
	if err != nil {
		t.Fatal(err)
	}
	if !p.Wait(t.Context(), time.Minute) || p.ExitCode() != 7 || p.Err() == nil || p.How() != "exit status 7" || p.Tail.Because() != ": last words" {
		t.Errorf("ended with %s%s", p.How(), p.Tail.Because())
	}
	if len(lines) != 1 || lines[0] != "here" {
		t.Errorf("%q", lines)
	}

	here := make(chan struct{})
	if p, err = s.Start(self, []string{processArg, "stay"}, nil, func([]byte) { close(here) }); err != nil {
		t.Fatal(err)
	}
	<-here
	if p.Wait(t.Context(), time.Millisecond) {
		t.Error("it has not ended")
	}
	p.Kill()
	if p.ExitCode() != -1 || p.How() != "signal: killed" {
		t.Errorf("ended with %s", p.How())
	}
	if _, err := s.Start([2]string{"/no/such/file", "x"}, nil, nil, nil); err == nil {
		t.Error("a file that is not there is no error")
	}
}

func TestMessages(t *testing.T) {
	var buf bytes.Buffer
	s := NewSender(&buf)
	s.Send(FailureOf(errors.New("plain")))
	s.Send(FailureOf(fmt.Errorf("x: %w", &EnvironmentError{"y"})))
	var got []error
	if err := Receive(&buf, func(f Failure) { got = append(got, f.Err()) }); err != nil {
		t.Fatal(err)
	}
	_, plain := errors.AsType[*EnvironmentError](got[0])
	_, environment := errors.AsType[*EnvironmentError](got[1])
	if len(got) != 2 || plain || !environment || got[0].Error() != "plain" || got[1].Error() != "x: y" {
		t.Errorf("%v", got)
	}
	if err := (*Failure)(nil).Err(); err != nil {
		t.Error(err)
	}
	if err := Receive(strings.NewReader(`{"text":`), func(Failure) {}); err == nil {
		t.Error("half a message is no error")
	}
}

func TestTail(t *testing.T) {
	var tail Tail
	if got := tail.Because(); got != "" {
		t.Errorf("empty: %q", got)
	}
	for range 3 {
		if _, err := tail.Write(bytes.Repeat([]byte("x"), tailSize)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := tail.Write([]byte("\nlast words\n\n")); err != nil {
		t.Fatal(err)
	}
	if got := tail.Because(); got != ": last words" || len(tail.buf) != tailSize {
		t.Errorf("%d bytes, %q", len(tail.buf), got)
	}
}
