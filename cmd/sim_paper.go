package cmd

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"sync"
	"time"

	"golang.org/x/term"

	"larder/conductor/sim"
	"larder/conductor/sim/paper"
)

// simPaperCmd is larder sim paper.
type simPaperCmd struct {
	Out   string `required:"" placeholder:"DIR" help:"Directory for report.md, report.json and the plots; made if it is not there."`
	Trace string `type:"existingfile" help:"The published conversation trace, or another in its format. Without one the experiments that need it are left out."`
	Quick bool   `help:"Fewer requests and points, in under a minute: to try it, not for figures."`
	Only  string `placeholder:"REGEXP" help:"Only experiments whose names match."`
	JSON  bool   `help:"Print the report as JSON, too."`
}

// Run implements the command.
func (c *simPaperCmd) Run(e *env) error {
	cfg := paper.Config{Quick: c.Quick}
	if c.Only != "" {
		r, err := regexp.Compile(c.Only)
		if err != nil {
			return usageError(fmt.Errorf("sim paper: --only: %w", err))
		}
		cfg.Only = r
	}
	if c.Trace != "" {
		f, err := os.Open(c.Trace)
		if err != nil {
			return fmt.Errorf("sim paper: %w", err)
		}
		cfg.Trace, err = sim.ReadTrace(f)
		if err := errors.Join(err, f.Close()); err != nil {
			return fmt.Errorf("sim paper: %s: %w", c.Trace, err)
		}
		cfg.TraceName = filepath.Base(c.Trace)
	}
	p := paperProgress{e: e, began: time.Now()}
	if f, ok := e.stderr.(*os.File); ok {
		p.terminal = term.IsTerminal(int(f.Fd()))
	}
	cfg.Progress = p.tell
	report, err := paper.Run(e.ctx, &cfg)
	p.tell("", 0)
	if err != nil {
		if errors.Is(err, paper.ErrNoneChosen) {
			err = usageError(err)
		}
		return err //nolint:wrapcheck // says all
	}
	if err := report.Write(c.Out); err != nil {
		return err //nolint:wrapcheck // says all
	}
	if c.JSON {
		return printJSON(e.stdout, report)
	}
	t := newTable("EXPERIMENT", "WHAT THEIRS SAY", "OURS TOO")
	for i := range report.Findings {
		for _, check := range report.Findings[i].Checks {
			t.row(report.Findings[i].Name, check.What, check.Holds)
		}
	}
	for _, left := range report.Left {
		t.row(left.Name, "left out: "+left.Why, "-")
	}
	if err := t.print(e.stdout); err != nil {
		return err
	}
	fmt.Fprintf(e.stdout, "\n%s\n", filepath.Join(c.Out, "report.md"))
	return nil
}

// paperProgress shows what is under way: one line that is overwritten on a terminal, else one line for each experiment.
type paperProgress struct {
	e        *env
	terminal bool

	mu    sync.Mutex
	began time.Time
	name  string
	runs  int
}

// tell implements paper.Config.Progress; an empty name is the end.
func (p *paperProgress) tell(name string, runs int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if name == p.name {
		p.runs = max(p.runs, runs)
		if p.terminal {
			fmt.Fprintf(p.e.stderr, "\r%s: %d runs, %v ", p.name, p.runs, time.Since(p.began).Round(time.Second))
		}
		return
	}
	if p.name != "" {
		if p.terminal {
			fmt.Fprint(p.e.stderr, "\r")
		}
		fmt.Fprintf(p.e.stderr, "%s: %d runs in %v\n", p.name, p.runs, time.Since(p.began).Round(time.Millisecond))
	}
	p.began, p.name, p.runs = time.Now(), name, runs
}
